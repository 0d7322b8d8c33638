"""A small model cut into pipeline stages, and the same in one piece."""

from types import SimpleNamespace
from typing import Any

import torch
from support.small_models import Layer
from torch import Tensor, nn

from megatron.core.initializers import Normal
from megatron.core.ops.embedding import embedding
from megatron.core.ops.linear import linear
from megatron.core.parameters import declare, initialize_parameters, name_parameters
from megatron.core.pipeline_parallel.stage_map import StageModules, stage_map

VOCABULARY, WIDTH, LENGTH = 11, 6, 5


def config(**fields: Any) -> SimpleNamespace:
    """What a pipeline reads of a TransformerConfig."""
    defaults = {
        "num_layers": 8,
        "hidden_size": WIDTH,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_schedule": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "mtp_num_layers": None,
        "microbatch_group_size_per_vp_stage": None,
        "overlap_p2p_comm": True,
        "variable_seq_lengths": False,
        "sequence_parallel": False,
        "pipeline_dtype": torch.float64,
        "calculate_per_token_loss": False,
        "no_sync_func": None,
        "grad_sync_func": None,
        "param_sync_func": None,
        "grad_scale_func": None,
        "finalize_model_grads_func": None,
        "timers": None,
        "barrier_with_L1_time": False,
    }
    return SimpleNamespace(**(defaults | fields))


class StageModel(nn.Module):
    """ids [b, s] -> on the last stage the sum of cross entropies [] with labels, weighted by a mask; else [s, b, h]."""

    def __init__(self, config: Any, part: StageModules) -> None:
        super().__init__()
        self.config, self.part = config, part
        self.hidden: Tensor | None = None
        if part.embedding:
            self.embedding = nn.Module()
            self.embedding.table = nn.Parameter(torch.empty(VOCABULARY, WIDTH, dtype=torch.float64))
            declare(self.embedding.table, Normal(0.5))
        self.layers = nn.ModuleList(Layer(WIDTH).double() for _ in part.layers)
        for number, layer in zip(part.layers, self.layers, strict=True):
            layer.canonical_index = number - 1  # type: ignore[assignment]
        if part.loss:
            self.head = nn.Module()
            self.head.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH, dtype=torch.float64))
            declare(self.head.weight, Normal(0.5))
        name_parameters(self)
        initialize_parameters(self, 3)

    def set_input_tensor(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        x = embedding(ids.t(), self.embedding.table) if self.part.embedding else self.hidden
        assert x is not None
        for layer in self.layers:
            x = layer(x)
        if not self.part.loss:
            return x * 1.0  # a stage without layers too gives a tensor of its own
        logits = linear(x, self.head.weight)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
        return (losses * mask.t().flatten()).sum()


def whole_model(num_layers: int = 8) -> StageModel:
    """All stages in one."""
    one = config(num_layers=num_layers)
    return StageModel(one, stage_map(one).stage_at(0))


def batch(number: int, rows: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels, mask of a micro-batch: functions of its number."""
    generator = torch.Generator().manual_seed(77 + number)
    ids, labels = torch.randint(VOCABULARY, (2, rows, length), generator=generator)
    return ids, labels, (torch.rand(rows, length, generator=generator) < 0.7).double()
