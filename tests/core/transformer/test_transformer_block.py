"""A stage's stack of layers: which layers it has, and in which shape it takes what another stage sent."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import randomize, tiny_config

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs, key_padding_mask
from megatron.core.transformer.transformer_block import TransformerBlock, block_spec_of_flag
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**fields: Any) -> TransformerConfig:
    return tiny_config(num_layers=8, num_attention_heads=2, **fields)


def groups(stages: int, rank: int) -> ProcessGroupCollection:
    """Those of a rank, planned: nothing is started."""
    return ProcessGroupCollection.from_grid(RankGrid(stages, pipeline=stages), rank)


def block(settings: TransformerConfig, rank: int = 0, vp_stage: int | None = None) -> TransformerBlock:
    ranks = settings.pipeline_model_parallel_size
    return TransformerBlock(
        settings,
        get_gpt_layer_local_spec(),
        post_process=False,
        pg_collection=groups(ranks, rank),
        vp_stage=vp_stage,
    )


def numbers(stage: TransformerBlock) -> list[int]:
    return [layer.layer_number for layer in stage.layers]  # type: ignore[union-attr, misc]


def test_a_stage_has_its_own_layers_numbered_over_the_whole_model() -> None:
    assert numbers(block(config())) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert numbers(block(config(pipeline_model_parallel_size=4), 2)) == [5, 6]
    two = config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert numbers(block(two, 1, vp_stage=0)) == [3, 4] and numbers(block(two, 1, vp_stage=1)) == [7, 8]
    v = config(pipeline_model_parallel_size=2, pipeline_schedule="zb-v")
    assert numbers(block(v, 1, vp_stage=1)) == [5, 6]
    assert numbers(block(config(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*8|L"), 1)) == []


def test_sizes_that_do_not_agree_are_named() -> None:
    with pytest.raises(UserError, match="pipeline_model_parallel_size is 1, the pipeline group has 2 ranks"):
        TransformerBlock(config(), get_gpt_layer_local_spec(), pg_collection=groups(2, 0))
    two = config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(UserError, match="a rank has 2 model chunks: give vp_stage, from 0 to 1"):
        block(two)
    with pytest.raises(UserError, match="vp_stage 2: a rank has 2 model chunks"):
        block(two, vp_stage=2)


def test_what_another_stage_sent_is_taken_in_the_shape_of_this_stages_tokens() -> None:
    """Two rows of packed documents, laid end to end: the wire knows of sequences and micro-batches only."""
    stage = block(config())
    randomize(stage)
    boundaries = torch.tensor([0, 3, 10], dtype=torch.int32)
    inputs = LayerInputs(Tokens(10, 1, cu_seqlens=boundaries, max_seqlen=7))
    hidden = torch.randn(10, 1, 16, dtype=torch.float64)
    expected = stage(hidden, inputs=inputs)
    stage.set_input_tensor(hidden.view(5, 2, 16))
    found = stage(None, inputs=inputs)
    assert found.shape == (10, 1, 16) and torch.equal(found, expected)
    assert not torch.equal(expected, torch.zeros_like(expected))


def test_wide_residuals_are_handed_on_as_they_are() -> None:
    assert config().pipeline_dtype is torch.float64
    half = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, bf16=True)
    wide = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, bf16=True, fp32_residual_connection=True
    )
    assert (half.pipeline_dtype, wide.pipeline_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
def test_an_encoder_sees_both_sides_and_no_padding(placement: str) -> None:
    settings = config(norm_placement=placement)
    layer = get_gpt_layer_local_spec(norm_placement=placement, attn_mask_type=AttnMaskType.padding)
    encoder = TransformerBlock(settings, layer, pg_collection=groups(1, 0))
    name_parameters(encoder)
    initialize_parameters(encoder, 1)
    hidden = torch.randn(5, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    found = encoder(hidden, key_padding_mask(mask))
    for row, length in ((0, 5), (1, 3)):
        alone = encoder(hidden[:length, row : row + 1])
        assert (found[:length, row : row + 1] - alone).abs().max() < 1e-12
    changed = hidden.clone()
    changed[2, :, 0] += 1.0
    assert ((encoder(changed, key_padding_mask(mask)) - found)[:2].abs().amax(-1) > 1e-6).all()  # tokens before it
    changed = hidden.clone()
    changed[3:, 1, 0] += 1.0
    assert torch.equal(encoder(changed, key_padding_mask(mask))[:3], found[:3])


OWN_LAYERS = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

def layer(config):
    return get_gpt_layer_local_spec(norm_placement="post" if config.num_layers == 8 else "pre")

CONFIG = TransformerConfig(num_layers=8, hidden_size=16, num_attention_heads=2)
BLOCK = get_gpt_decoder_block_spec(CONFIG, False, pp_rank=0)

def wide(width, *rest):
    return width

NUMBER = 5
"""


def test_layers_that_a_flag_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_layers.py").write_text(OWN_LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_layers", raising=False)
    assert len(block_spec_of_flag(["own_layers", "BLOCK"], config(), pp_rank=0).layer_specs or []) == 8
    halves = config(pipeline_model_parallel_size=2)
    layers = block_spec_of_flag(["own_layers", "layer"], halves, pp_rank=1).layer_specs or []
    assert len(layers) == 4 and all(one.submodules.input_layernorm is IdentityOp for one in layers)
    for name, sentence in {
        "NUMBER": "--spec own_layers NUMBER gives int 5; expected a ModuleSpec",
        "wide": "the function needs width; it is given config, vp_stage",
        "nowhere": "names nothing that can be imported",
    }.items():
        with pytest.raises(UserError, match=sentence):
            block_spec_of_flag(["own_layers", name], config(), pp_rank=0)
