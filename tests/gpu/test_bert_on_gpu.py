"""BERT on a GPU: padded rows through every attention kernel give a CPU's numbers in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.bert import BertModel
from megatron.core.models.bert.bert_layer_specs import get_bert_encoder_block_spec
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

LENGTH, ROWS = 128, 4
TOKENS = Tokens(LENGTH, ROWS, random=RngPosition(3, 5, 0))


def build(device: str, **settings: Any) -> BertModel:
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.1, **settings}
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, use_cpu_initialization=True, **settings
    )
    return BertModel(config, 2, get_bert_encoder_block_spec(config, pp_rank=0), 101, LENGTH).to(device)


def results(model: BertModel, device: str, lengths: tuple[int, ...] = (128, 100, 17, 2)) -> list[Tensor]:
    """Losses of real tokens, logits of the binary head, gradients; on the CPU in float64."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 101, (ROWS, LENGTH), generator=generator).to(device)
    real = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).to(device)
    losses, in_order = model(ids, real, (ids > 50).long(), lm_labels=ids, tokens=TOKENS)
    ((losses * real).mean() + in_order.square().mean()).backward()
    found = [losses * real, in_order, *(parameter.grad for parameter in model.parameters())]
    return [tensor.detach().cpu().double() for tensor in found]


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize(("precision", "tolerance"), [("params_dtype", 1e-4), ("bf16", 0.1)])
def test_a_gpu_gives_a_cpus_numbers(precision: str, tolerance: float, backend: str, dropout: float) -> None:
    types = {"bf16": True} if precision == "bf16" else {"params_dtype": torch.float32}
    drops = {"hidden_dropout": dropout, "attention_dropout": dropout}
    found = results(build("cuda", attention_backend=AttnBackend[backend], **types, **drops), "cuda")
    assert error(found, results(build("cpu", fp64=True, **drops), "cpu")) < tolerance


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_row_of_padding_alone_is_finite(precision: str, backend: str, dropout: float) -> None:
    settings = {precision: True, "attention_backend": AttnBackend[backend], "attention_dropout": dropout}
    assert all(tensor.isfinite().all() for tensor in results(build("cuda", **settings), "cuda", (128, 0, 17, 0)))
