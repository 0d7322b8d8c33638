"""Makes the loss of one micro-batch from the result of a loss function, scaled as a part of the step's loss."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.communication.collectives import all_reduce
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class StepLosses:
    """Scales the losses of a step's micro-batches, and collects what the loss function reports."""

    def __init__(
        self,
        config: "TransformerConfig",
        groups: ProcessGroupCollection,
        num_microbatches: int,
        collect_non_loss_data: bool,
        grad_scale_func: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self.groups, self.num_microbatches = config, groups, num_microbatches
        self.collect_non_loss_data, self.grad_scale_func = collect_non_loss_data, grad_scale_func
        self.reports: list[Any] = []
        """The reports of the loss function, one per micro-batch; empty on ranks without the last stage."""
        self.num_tokens: Tensor | None = None
        """Tokens of all micro-batches, summed from loss functions that return three values: a float64 scalar on the
        device. None on ranks without the last stage."""

    def record(self, output: Tensor, loss_func: Callable[..., Any] | None) -> Tensor:
        """Calls the loss function on an output of the last stage and keeps its report. Returns the tensor from which
        backward starts."""
        if loss_func is None:
            self.reports.append(output)
            return output
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        return self._loss(loss_func(output))

    def add(self, report: Any, num_tokens: Tensor | None) -> None:
        """Adds the report and the number of tokens of a micro-batch whose loss another object has recorded."""
        self.reports.append(report)
        if num_tokens is not None:
            self._count(num_tokens)

    def auxiliary_scale(self, device: torch.device) -> Tensor:
        """Returns the gradient of an auxiliary loss, which a layer adds to the model's loss (for example to balance its
        experts): a float64 scalar on the device. It is scaled as the model's loss is, loss scale included.

        An auxiliary loss is a sum over context parallel ranks; each rank has one addend. With a loss per token the
        layer has already multiplied it by its number of tokens.
        """
        scale = 1.0 if self.config.calculate_per_token_loss else self.groups.size("cp") / self.num_microbatches
        one = torch.full((), scale, dtype=torch.float64, device=device)
        return one if self.grad_scale_func is None else self.grad_scale_func(one)

    def _loss(self, result: Sequence[Any]) -> Tensor:
        context_parallel, count = self.groups.size("cp"), self.num_microbatches
        if len(result) == 2:
            loss, report = result
            if self.config.calculate_per_token_loss:
                raise UserError(
                    "--calculate-per-token-loss needs a loss function that returns three values (sum, number of "
                    "tokens, report); this one returned two"
                )
            # Gradients are also averaged over context parallel ranks, although each has only a part of the sequence.
            loss = loss * context_parallel / count
        else:
            loss, tokens, report = result
            if not isinstance(tokens, Tensor):
                tokens = torch.full((), tokens, device=loss.device)  # fills on the device; a copy would wait
            self._count(tokens)
            if not self.config.calculate_per_token_loss:
                loss = loss * context_parallel / self._over_context_parallel(tokens).clamp(min=1) / count
        self.reports.append(report)
        return loss

    def _over_context_parallel(self, tokens: Tensor) -> Tensor:
        """Returns the tokens of the micro-batch on all context parallel ranks."""
        if self.groups.size("cp") == 1:
            return tokens
        return all_reduce(tokens.clone(), self.groups.cp)

    def _count(self, tokens: Tensor) -> None:
        tokens = tokens.detach().reshape(()).double()
        self.num_tokens = tokens if self.num_tokens is None else self.num_tokens + tokens
