"""T5 on a GPU: cross attention and relative positions give a CPU's numbers in float64, in every attention kernel."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.micro_batch import MicroBatch
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.tokens import RngPosition
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.kernels_in_use import AttentionInUse, kernels_in_use
from megatron.core.transformer.layer_inputs import key_padding_mask
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

READ, WRITTEN, ROWS = 128, 64, 4
STEP = MicroBatch(rng_position=RngPosition(3, 5, 0))


def build(device: str, positions: str, **settings: Any) -> T5Model:
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.1, **settings}
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, use_cpu_initialization=True, **settings
    )
    specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
    model = T5Model(config, copy.copy(config), *specs, 101, READ, position_embedding_type=positions)  # type: ignore[arg-type]
    return model.to(device)


def results(model: T5Model, device: str) -> list[Tensor]:
    """Returns losses and gradients, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    read, written = (torch.randint(0, 101, (ROWS, n), generator=generator).to(device) for n in (READ, WRITTEN))
    padding = key_padding_mask(torch.arange(READ) < torch.tensor((128, 100, 17, 2))[:, None]).to(device)
    losses = model(read, written, padding, None, padding, lm_labels=written, micro_batch=STEP)
    losses.mean().backward()
    found = [losses, *(parameter.grad for parameter in model.parameters())]
    return [tensor.detach().cpu().double() for tensor in found]


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(ours, theirs, strict=True))


def attention_of(model: T5Model) -> list[AttentionInUse]:
    return [found for found in kernels_in_use(model, torch.device("cuda")) if isinstance(found, AttentionInUse)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("positions", ["learned_absolute", "relative"])
@pytest.mark.parametrize(("precision", "tolerance"), [("params_dtype", 1e-4), ("bf16", 0.1)])
def test_a_gpu_gives_a_cpus_numbers(precision: str, tolerance: float, positions: str, dropout: float) -> None:
    types = {"bf16": True} if precision == "bf16" else {"params_dtype": torch.float32}
    drops = {"hidden_dropout": dropout, "attention_dropout": dropout}
    found = results(build("cuda", positions, **types, **drops), "cuda")
    assert error(found, results(build("cpu", positions, fp64=True, **drops), "cpu")) < tolerance


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_kernels_agree_on_the_masks_of_cross_attention(backend: str) -> None:
    """In half precision with dropout, our own flash attention draws the masks of the unfused kernel."""
    model = build("cuda", "learned_absolute", bf16=True, attention_dropout=0.3, attention_backend=AttnBackend[backend])
    (crossing,) = (found for found in attention_of(model) if found.crosses)
    assert ("our flash attention" in crossing.kernels) == (backend == "auto"), crossing
    expected = results(build("cpu", "learned_absolute", fp64=True, attention_dropout=0.3), "cpu")
    assert error(results(model, "cuda"), expected) < 0.1


def test_relative_positions_with_our_own_flash_attention() -> None:
    model = build("cuda", "relative", bf16=True, attention_dropout=0.1)
    found = attention_of(model)
    assert any(not each.crosses and "our flash attention" in each.kernels for each in found), found
    expected = results(build("cpu", "relative", fp64=True, attention_dropout=0.1), "cpu")
    assert error(results(model, "cuda"), expected) < 0.1
