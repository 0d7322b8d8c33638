"""From what a loss function returns to the part of the step's loss that a micro-batch is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.exceptions import UserError
from megatron.core.process_groups_config import ProcessGroupCollection


class Losses:
    """The losses of a step's micro-batches, and what they report."""

    def __init__(
        self, config: Any, groups: ProcessGroupCollection, num_microbatches: int, collect_non_loss_data: bool
    ) -> None:
        self.config, self.groups, self.num_microbatches = config, groups, num_microbatches
        self.collect_non_loss_data = collect_non_loss_data
        self.reports: list[Any] = []
        """What the loss function reports, one entry a micro-batch; empty on ranks without the last stage."""
        self.num_tokens: Tensor | None = None
        """Tokens of all micro-batches, as three-value loss functions count them: a float64 scalar on the device. None
        on ranks without the last stage."""

    def take(self, output: Tensor, loss_func: Callable[..., Any] | None) -> Tensor:
        """Keep what the last stage reports of an output; returns what backward begins from."""
        if loss_func is None:
            self.reports.append(output)
            return output
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        return self._loss(loss_func(output))

    def auxiliary_scale(self, device: torch.device) -> Tensor:
        """What a loss that a layer adds to the model's, such as the balance of its experts, counts by in the gradients
        of a micro-batch: as the model's loss does, the loss scale included. A float64 scalar on the device.

        Each rank's part of such a loss is taken as a part of a sum over context parallel ranks; with a loss per token
        it is one that the layer has multiplied by the tokens it stands for.
        """
        scale = 1.0 if self.config.calculate_per_token_loss else self.groups.size("cp") / self.num_microbatches
        one = torch.full((), scale, dtype=torch.float64, device=device)
        return one if self.config.grad_scale_func is None else self.config.grad_scale_func(one)

    def _loss(self, result: Sequence[Any]) -> Tensor:
        parts, count = self.groups.size("cp"), self.num_microbatches
        if len(result) == 2:
            loss, report = result
            if self.config.calculate_per_token_loss:
                raise UserError(
                    "--calculate-per-token-loss needs a loss function that returns three values (sum, number of "
                    "tokens, report); this one returned two"
                )
            # Gradients are averaged over context parallel ranks too, each of which has a part of the sequence.
            loss = loss * parts / count
        else:
            loss, tokens, report = result
            if not isinstance(tokens, Tensor):
                tokens = torch.full((), tokens, device=loss.device)  # a kernel, not a copy that waits
            self._count(tokens)
            if not self.config.calculate_per_token_loss:
                loss = loss * parts / self._of_whole_sequences(tokens).clamp(min=1) / count
        self.reports.append(report)
        return loss

    def _of_whole_sequences(self, tokens: Tensor) -> Tensor:
        """Tokens of the micro-batch over all its context parallel parts."""
        if self.groups.size("cp") == 1:
            return tokens
        return all_reduce(tokens.clone(), self.groups.cp)

    def _count(self, tokens: Tensor) -> None:
        tokens = tokens.detach().reshape(()).double()
        self.num_tokens = tokens if self.num_tokens is None else self.num_tokens + tokens
