"""The stacked weights of one product of all experts of a rank, for a grouped product."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend
from megatron.core.communication.collectives import Group, group_rank
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import Constant, Initializer, each_of
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.recipes import LinearSplit
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.parameters import Box
from megatron.core.tensor_parallel.sharded_state import ShardedStateModule
from megatron.core.tensor_parallel.storage import new_parameter, split_box
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedLinear(ShardedStateModule):
    """Computes y_e = x_e W_e^T (+ b_e) for the experts of this rank, without communication. Tensor parallel ranks
    divide the output channels of each expert, or with `splits_inputs` the input channels.

    Canonical shapes: `weight` [experts, *out, in] and `bias` [experts, *out], where `out` are the dimensions of the
    outputs; ranks divide the last of them. State dicts hold each expert separately, as in Megatron-LM: `weight0`,
    `weight1`, ...
    """

    def __init__(
        self,
        config: TransformerConfig,
        experts: range,
        input_size: int,
        out: tuple[int, ...],
        *,
        init_method: Initializer,
        bias: bool,
        splits_inputs: bool,
        tp_group: Group,
        backend: Backend,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        """`experts`: global indices of this rank's experts. `micro_batches`: groups of sources whose rows share fp8
        scales."""
        super().__init__()
        assert config.num_moe_experts is not None
        self.config, self.backend, self.local_experts = config, backend, len(experts)
        self.splits_inputs = splits_inputs
        matrix = (*out, input_size)
        box = split_box(matrix, len(out) if splits_inputs else len(out) - 1, tp_group)
        rows = Box(box.start[:-1], box.shape[:-1])
        facts: dict[str, Any] = {"grid": "expert", "sharded_axes": frozenset({"ep", "etp"})}
        self.weight = new_parameter(
            config,
            (len(experts), rows.numel, box.shape[-1]),
            each_of(init_method),
            global_shape=(config.num_moe_experts, *matrix),
            box=_stacked(box, experts),
            **facts,
        )
        self.register_parameter("bias", None)
        self.adds_bias = not splits_inputs or group_rank(tp_group) == 0
        """Whether this rank adds the bias and receives its gradient: only the first tensor parallel rank of a sum
        does."""
        if bias:
            if splits_inputs:
                facts = {"grid": "expert", "sharded_axes": frozenset({"ep"})}
                facts["partial_gradient_axes"] = frozenset({"etp"})
            self.bias = new_parameter(
                config,
                (len(experts), rows.numel),
                Constant(0.0),
                global_shape=(config.num_moe_experts, *out),
                box=_stacked(rows, experts),
                **facts,
            )
        split = LinearSplit(inputs=tp_group) if splits_inputs else LinearSplit(outputs=tp_group)
        self.linear = backend.make_grouped_linear(split, self.weight, micro_batches or MicroBatches())
        self.register_state_dict_post_hook(_take_apart)
        self.register_load_state_dict_pre_hook(_put_together)

    def forward(self, inputs: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor | None]:
        """Returns (output [n, out], bias of each row [n, out] that the caller adds, or None) for rows [n, in] sorted by
        expert."""
        return self.linear(inputs, self.weight, groups), self._bias_of_rows(inputs, groups)

    def _bias_of_rows(self, inputs: Tensor, groups: RowGroups) -> Tensor | None:
        if self.bias is None:
            return None
        bias = self.bias if self.adds_bias else self.bias * 0.0
        return self.backend.experts.grouped_bias(bias, groups, inputs.shape[0])


def micro_batches_of(groups: ProcessGroupCollection) -> MicroBatches:
    """Returns which sources of an expert's rows, in the order of their rows, have tokens of the same micro-batch."""
    ep, etp = groups.size("ep"), groups.size("expt_tp")
    if groups.grid is None:  # filled by hand: the groups of other ranks are not known
        return MicroBatches(range(ep * etp))
    sources = [source for other in groups.ranks("expt_tp") for source in groups.ranks("ep", of=other)]
    shared = [groups.ranks("tp_cp", of=source) for source in sources]
    elsewhere = set(groups.ranks("tp_cp")) - set(sources)
    return MicroBatches(
        [shared.index(ranks) for ranks in shared],
        groups.tp_cp if elsewhere else None,
        (groups.rank("expt_tp") * ep + groups.rank("ep"), ep * etp),
    )


def _stacked(box: Box, experts: range) -> Box:
    return Box((experts.start, *box.start), (len(experts), *box.shape))


def _take_apart(module: nn.Module, state: dict[str, Any], prefix: str, *unused: object) -> None:
    for name in ("weight", "bias"):
        stacked = state.pop(prefix + name, None)
        if stacked is not None:
            state.update({f"{prefix}{name}{number}": part for number, part in enumerate(stacked.unbind(0))})


def _put_together(module: nn.Module, state: dict[str, Any], prefix: str, *unused: object) -> None:
    if state.get(prefix + "_extra_state", 0) is None:  # Megatron-LM saves it, empty
        del state[prefix + "_extra_state"]
    for name in ("weight", "bias"):
        numbered = re.compile(rf"{re.escape(prefix)}{name}(\d+)")
        parts = {int(match[1]): key for key in state if (match := numbered.fullmatch(key))}
        if parts and sorted(parts) == list(range(module.local_experts)):  # type: ignore[arg-type]
            state[prefix + name] = torch.stack([state.pop(parts[number]) for number in sorted(parts)])
