"""Flags of multi-head latent attention: what they make, what they refuse, what they say."""

import sys

import pytest
from support.command_lines import SMALL, configured, problems_of

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.inspection.run_description import architecture_differences, architecture_of

MLA = "--multi-latent-attention"


def test_the_flag_makes_a_config_of_its_own_with_megatron_lms_defaults() -> None:
    transformer = configured(MLA).transformer
    assert isinstance(transformer, MLATransformerConfig)
    sizes = (transformer.q_lora_rank, transformer.kv_lora_rank, transformer.qk_head_dim, transformer.v_head_dim)
    assert sizes == (None, 32, 128, 128)  # of Megatron-LM's command line; the library's are others
    assert (transformer.rope_type, transformer.rotary_scaling_factor) == ("yarn", 1.0)
    assert transformer.normalization == "LayerNorm" and MLATransformerConfig.normalization == "RMSNorm"
    assert type(configured().transformer) is TransformerConfig


def test_every_flag_arrives() -> None:
    transformer = configured(
        f"{MLA} --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 6 --v-head-dim 10 "
        "--rope-type rope --rotary-base 500 --rotary-percent 0.7 --rotary-scaling-factor 3 --mscale 0.7 "
        "--mscale-all-dim 0.9 --original-max-position-embeddings 64 --beta-fast 8 --beta-slow 2 --normalization RMSNorm"
    ).transformer
    assert isinstance(transformer, MLATransformerConfig)
    assert (transformer.q_lora_rank, transformer.kv_lora_rank, transformer.qk_head_dim) == (24, 20, 12)
    assert (transformer.qk_pos_emb_head_dim, transformer.v_head_dim, transformer.rope_type) == (6, 10, "rope")
    assert (transformer.rotary_base, transformer.rotary_percent, transformer.rotary_scaling_factor) == (500, 0.7, 3)
    assert (transformer.mscale, transformer.mscale_all_dim) == (0.7, 0.9)
    assert (transformer.original_max_position_embeddings, transformer.beta_fast, transformer.beta_slow) == (64, 8, 2)
    assert transformer.normalization == "RMSNorm"


def test_heads_need_not_share_out_the_hidden_size() -> None:
    assert problems_of("--hidden-size 65")
    assert configured(f"{MLA} --hidden-size 65").transformer.hidden_size == 65


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--group-query-attention --num-query-groups 2", "--num-query-groups 2 does not go with"),
        ("--add-qkv-bias --disable-bias-linear", "whose projections have no biases"),
        ("--qk-pos-emb-head-dim 7", "rotates 7 channels of a head"),
        ("--rotary-interleaved", "--rotary-interleaved does not go with"),
        ("--use-rope-scaling", "--use-rope-scaling does not go with"),
        ("--rope-scaling-original-length 64", "--rope-scaling-original-length 64 does not go with"),
        ("--rope-scaling-type yarn", "--rope-type chooses how its frequencies are scaled"),
        ("--rotary-base 1", "--rotary-base 1 must be larger than 1"),
        ("--kv-lora-rank 0", "--kv-lora-rank 0 must be at least 1"),
        ("--beta-fast 1", "--beta-fast 1.0 must be larger than --beta-slow 1"),
        ("--tensor-model-parallel-size 8", "does not divide --num-attention-heads 4"),
    ],
)
def test_what_does_not_go_with_it(flags: str, message: str) -> None:
    assert any(message in problem for problem in problems_of(f"{MLA} {flags}", ranks=8))


def test_what_changes_nothing_is_said() -> None:
    def said(flags: str, word: str) -> list[str]:
        return [note for note in configured(flags).notes if word in note]

    assert said(f"{MLA} --kv-channels 64", "--kv-channels: has no effect")
    assert said("--kv-lora-rank 64", "--kv-lora-rank 64: has no effect without --multi-latent-attention")
    assert said("--rotary-base 500", "--rotary-base 500: has no effect")
    assert not said(f"{MLA} --rotary-base 500", "--rotary-base")  # learned positions beside it or not


def test_a_checkpoint_knows_its_sizes() -> None:
    one, other = configured(f"{MLA} --kv-lora-rank 20"), configured(f"{MLA} --mscale-all-dim 1 --rotary-base 500")
    differences = "; ".join(architecture_differences(other, {"architecture": architecture_of(one)}))
    for flag in ("--kv-lora-rank is 32", "--mscale-all-dim is 1.0", "--rotary-base is 500"):
        assert flag in differences
    assert "kv_lora_rank" not in architecture_of(configured())


def test_scripts_get_the_same_config(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{SMALL} {MLA} --rotary-base 777 --normalization RMSNorm --beta-fast 16"
    monkeypatch.setattr(sys, "argv", ["script.py", *words.split()])
    arguments = validate_args(parse_args())
    config = core_transformer_config_from_args(arguments)
    assert isinstance(config, MLATransformerConfig) and config == arguments.config.transformer
    assert (config.rotary_base, config.normalization, config.beta_fast) == (777, "RMSNorm", 16)
