"""Loss reductions: what turns a model's output into a loss, and reports of micro-batches into one number."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import all_reduce
from megatron.core.groups.defaults import groups_or_default
from megatron.facades.nemo.lightning.arguments import Foreign

Report = Mapping[str, Tensor]


class MegatronLossReduction(nn.Module):
    """A base class. `forward(batch, forward_out)` returns (mean loss, report) or (sum of losses, number of tokens,
    report), as loss functions of Megatron-LM do; `reduce(reports)` returns one number for several micro-batches."""

    batch: Foreign = None

    def setup(self, batch: Foreign) -> None:
        """Keeps the batch for a call with the output alone."""
        self.batch = batch

    def __call__(self, *arguments: Foreign) -> Foreign:
        """Computes the loss of (batch, output), or of an output with the batch of `setup`."""
        return super().__call__(*(arguments if len(arguments) > 1 else (self.batch, *arguments)))

    def forward(self, batch: Foreign, forward_out: Foreign) -> tuple[Tensor, Report]:
        """Returns the loss and the report of a micro-batch."""
        raise NotImplementedError

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Report]) -> Tensor:
        """Returns the loss of several micro-batches."""
        raise NotImplementedError


class MaskedTokenLossReduction(MegatronLossReduction):
    """The mean loss of unmasked tokens. Every row counts with its tokens, so the last batch of an evaluation may be
    shorter; `validation_step` and `val_drop_last` change nothing."""

    def __init__(self, validation_step: bool = False, val_drop_last: bool = True) -> None:
        super().__init__()
        self.validation_step, self.val_drop_last = validation_step, val_drop_last

    def forward(self, batch: Foreign, forward_out: Foreign) -> tuple[Tensor, Tensor, Report]:  # type: ignore[override]
        """Returns the sum of the losses [b, s] of unmasked tokens, their number, and both for the report."""
        losses = forward_out[0] if isinstance(forward_out, tuple) else forward_out
        total, count = masked_token_loss(losses, batch["loss_mask"])
        return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Report]) -> Tensor:
        """Returns the mean over all tokens of the micro-batches of all data and context parallel ranks."""
        pairs = torch.stack([next(iter(report.values())) for report in losses_reduced_per_micro_batch])
        total = pairs.sum(dim=0)
        groups = groups_or_default(None)
        total = all_reduce(total, groups.dp_cp) if groups.size("dp_cp") > 1 else total
        return total[0] / total[1].clamp(min=1)


class MaskedTokenLossReductionWithLossMask(MaskedTokenLossReduction):
    """Computes the loss of models that return (losses, loss mask)."""

    def forward(self, batch: Foreign, forward_out: Foreign) -> tuple[Tensor, Tensor, Report]:  # type: ignore[override]
        """Returns the same as MaskedTokenLossReduction, with the mask of the output."""
        losses, mask = forward_out
        return super().forward({"loss_mask": mask}, losses)


def masked_token_loss(tensor: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses [b, s] of unmasked tokens, and their number."""
    weights = mask.view(-1).to(tensor.dtype)
    return torch.sum(tensor.view(-1) * weights), weights.sum().to(torch.int64)
