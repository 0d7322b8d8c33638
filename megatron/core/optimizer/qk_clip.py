"""QK-Clip (MuonClip, Kimi K2, arXiv:2507.20534): after an update, scales down the query and key weights of heads whose
attention logits in this step were above a threshold."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.state_storage import WithRemainder, split_float32
from megatron.core.transformer.attention_logits import AttentionLogits

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class QKClip:
    """Measures the attention logits of a step and clips the weights, by the settings of the model's config."""

    def __init__(
        self,
        config: "TransformerConfig",
        chunks: Sequence[nn.Module],
        groups: ProcessGroupCollection,
        device: torch.device,
    ):
        self.config = config
        self.logits = AttentionLogits(chunks, groups, device)

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], groups: ProcessGroupCollection, device: torch.device) -> "QKClip | None":
        """Returns the measurement if the model's config asks for it, otherwise None."""
        config = getattr(chunks[0], "config", None)
        wanted = getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        return None if config is None or not wanted else cls(config, chunks, groups, device)

    @staticmethod
    def refuse(chunks: Sequence[nn.Module], optimizer: str) -> None:
        """Raises UserError if the model's config asks for a measurement, which this optimizer does not support."""
        for name in ("qk_clip", "log_max_attention_logit"):
            if getattr(getattr(chunks[0], "config", None), name, False):
                raise UserError(f"--{name.replace('_', '-')}: {optimizer} does not support it; use --optimizer")

    @torch.no_grad()
    def clip(self, states: Sequence[Any], applied: Tensor, like_stored: bool) -> None:
        """Scales the rows of the query and key weights in the shards of these `UnitState`s, if `applied`, a bool scalar
        on the device, is set. `like_stored`: bfloat16 weights are rounded as in `WithRemainder`."""
        if not self.config.qk_clip:
            return
        factors = dict(self.logits.row_factors(self.config.qk_clip_threshold, self.config.qk_clip_alpha))
        for state in states:
            for part in state.unit.parameter_slices:
                rows = factors.get(part.slot.parameter)
                if rows is None:
                    continue
                rows = torch.where(applied, rows, 1.0)
                weights = state.weights.part(part.start, part.stop)
                values = weights.decode()
                first = part.flat_range[0] if part.flat_range is not None else 0
                scale_rows(values, rows, first, part.info.box.numel // len(rows))
                weights.encode(values)
                stores_model = state.unit.plan.needs_main_weights and not state.unit.derives_shard
                if stores_model and not isinstance(weights, WithRemainder):
                    model_weights = part.view_in(state.unit.weight_shard)
                    as_stored = like_stored and model_weights.dtype is torch.bfloat16
                    model_weights.copy_(split_float32(values)[0] if as_stored else values)


def scale_rows(values: Tensor, factors: Tensor, first: int, width: int) -> None:
    """Multiplies a flat range of a matrix, which begins at its element `first`, by the factor of each row, in place.
    Rows have `width` elements."""
    end = first + values.numel()
    whole = min(-(-first // width) * width, end), max(end // width * width, first)  # the rows that are complete
    if whole[0] < whole[1]:
        inside = values[whole[0] - first : whole[1] - first].view(-1, width)
        inside.mul_(factors[whole[0] // width : whole[1] // width, None].to(values.dtype))
    edges = [(first, whole[0]), (whole[1], end)] if whole[0] <= whole[1] else [(first, end)]
    for start, stop in edges:
        if start < stop:
            values[start - first : stop - first].mul_(factors[start // width].to(values.dtype))
