"""What a model predicts for rows of tokens, in every layout: the same numbers on every rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_gather, all_reduce, gather_rows, group_rank, group_size
from megatron.core.context_parallel import sequence_part
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.pipeline_parallel.schedules import config_of, get_forward_backward_func
from megatron.core.tokens import Tokens, row_index
from megatron.core.utils.keywords import Keywords
from megatron.training.data.batch import Batch
from megatron.training.evaluate import eval_mode

ReportOf = Callable[[Tensor, Tensor, Group], Tensor]


@dataclass(frozen=True)
class Prediction:
    """A model's predictions for a row of n tokens."""

    log_probs: Tensor
    """Log-probability of each token but the first, given those before it: float64 [n - 1], on the host."""
    likeliest: Tensor
    """The likeliest token at these positions: int64 [n - 1], on the host."""


class Predictor(Protocol):
    """A model that scores rows of at most `max_length` + 1 tokens. Every rank of a run calls it with the same rows."""

    max_length: int

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[Prediction]:
        """Returns the predictions for each row, which has at least two tokens."""
        ...


class LayoutPredictor:
    """Predicts with the chunks of a model whose layout is that of `groups`.

    Rows of similar length are put together, padded on the right. Micro-batch m of data parallel rank r has the rows
    from (m * ranks + r) * micro_batch_size on, so a micro-batch is the same under every layout.
    """

    def __init__(
        self,
        model: Sequence[nn.Module],
        groups: ProcessGroupCollection,
        device: torch.device,
        micro_batch_size: int,
        max_length: int,
    ) -> None:
        self.model, self.groups, self.device = list(model), groups, device
        self.micro_batch_size, self.max_length = micro_batch_size, max_length
        inner = _unwrapped(self.model[0])
        self._vocab_size = getattr(inner, "vocab_size", 0)
        if "tokens" not in Keywords.of(inner.forward):
            raise UserError(
                f"--eval-tasks: {type(inner).__name__}.forward does not take position_ids and tokens as "
                "GPTModel does, so rows of tokens cannot be scored; leave the flag out"
            )

    @torch.no_grad()
    def __call__(self, rows: Sequence[Sequence[int]]) -> list[Prediction]:
        """Returns the predictions for each row. Collective."""
        found: dict[int, Prediction] = {}
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        per_call = self._rows_of_call
        with eval_mode(self.model):
            for first in range(0, len(order), per_call):
                numbers = order[first : first + per_call]
                chosen = [rows[number] for number in numbers]
                table = self._table(chosen, per_call, predictions, 2, torch.float64).cpu()
                for number, (log_probs, likeliest) in zip(numbers, table.unbind(1), strict=False):
                    stop = len(rows[number]) - 1
                    found[number] = Prediction(log_probs[:stop], likeliest[:stop].long())
        return [found[number] for number in range(len(rows))]

    @property
    def _rows_of_call(self) -> int:
        """Rows of a call of the schedule: micro-batches that fill a pipeline a few times."""
        stages, config = self.groups.size("pp"), config_of(self.model[0])
        group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
        return self.micro_batch_size * self.groups.size("dp") * (4 * group if stages > 1 else 1)

    def _length(self, longest: int) -> int:
        """Returns the length of the rows of a call, which every split of a row divides."""
        multiple = 32 * self.groups.size("cp") * self.groups.size("tp")
        return min(-(-longest // multiple) * multiple, self.max_length)

    @torch.no_grad()
    def full_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits after each token of the rows: [rows, longest row, vocabulary], in float32 at least, on the
        device, the same on every rank. Logits beyond the end of a row have no meaning. Collective."""
        wide = torch.promote_types(config_of(self.model[0]).params_dtype, torch.float32)
        per_call, longest = self._rows_of_call, max(map(len, rows))
        found = []
        with eval_mode(self.model):
            for first in range(0, len(rows), per_call):
                chosen = [[*row, 0] for row in rows[first : first + per_call]]
                table = self._table(chosen, per_call, self._gathered, self._vocab_size, wide)
                found.append(table[:, : len(chosen)])
        width = max(table.shape[2] for table in found)
        padded = [nn.functional.pad(table, (0, width - table.shape[2])) for table in found]
        return torch.cat(padded, 1)[:, :, :longest].permute(1, 2, 0)

    def _gathered(self, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        """Returns the logits of the whole vocabulary [vocabulary, b, s]."""
        return torch.cat(all_gather(logits, group), -1)[..., : self._vocab_size].permute(2, 0, 1)

    def _table(
        self, given: Sequence[Sequence[int]], count: int, report_of: ReportOf, values: int, dtype: torch.dtype
    ) -> Tensor:
        """Returns `values` numbers for each position of rows filled up to `count`: [values, count, length]. `report_of`
        computes them for a micro-batch, from (logits [b, s, part of the vocabulary], labels [b, s], the group of the
        parts)."""
        length = self._length(max(map(len, given)) - 1)
        ids = torch.zeros(count, length + 1, dtype=torch.int64)
        real = torch.zeros(count, length)
        for number, row in enumerate(given):
            ids[number, : len(row)] = torch.tensor(row)
            real[number, : len(row) - 1] = 1.0
        positions = torch.arange(length).expand(count, -1)
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        ranks, mine, size = self.groups.size("dp"), self.groups.rank("dp"), self.micro_batch_size
        starts = range(mine * size, count, ranks * size)
        part = sequence_part(self.groups)
        batches = [
            Batch(tokens[rows], labels[rows], real[rows], positions[rows]).part(part).to(self.device)
            for rows in (slice(start, start + size) for start in starts)
        ]
        iterators = [iter(batches) for _ in self.model]
        reports = get_forward_backward_func(self.groups.size("pp"), len(self.model))(
            forward_step_func=partial(self._forward_step, report_of),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.model,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        table = torch.zeros(values, count, length, dtype=dtype, device=self.device)
        places = row_index(self._tokens(batches[0]), self.device)
        for start, report in zip(starts, reports, strict=bool(reports)):
            table[:, start : start + size, places] = report.to(dtype)
        for name in ("dp_cp", "pp"):  # each element is known to one rank of these; the others have 0
            if self.groups.size(name) > 1:
                all_reduce(table, getattr(self.groups, name))
        return table

    def _tokens(self, batch: Batch) -> Tokens:
        rows, length = batch.tokens.shape
        return Tokens(length, rows, sequence_part(self.groups), batch.position_ids)

    def _forward_step(
        self, report_of: ReportOf, data: Iterator[Batch], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Tensor]]:
        batch = next(data)
        config = config_of(model)
        # Padding must not take the places of tokens among those that an expert can hold.
        masks = getattr(config, "moe_expert_capacity_factor", None) is not None
        padding = {"padding_mask": batch.loss_mask == 0} if masks else {}
        output = model(batch.tokens, batch.position_ids, None, tokens=self._tokens(batch), **padding)
        group = self.groups.tp if self.groups.size("tp") > 1 else None
        return output, lambda logits, non_loss_data: report_of(logits, batch.labels, group)


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(getattr(model, "module", None), nn.Module):
        model = cast(nn.Module, model.module)
    return model


def predictions(logits: Tensor, labels: Tensor, group: Group) -> Tensor:
    """Returns the log-probability of each label and the likeliest token, as float64 [2, b, s]: logits [b, s, part of
    the vocabulary on this rank of `group`], labels int64 [b, s]."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), group=group).view(labels.shape)
    return torch.stack([-losses.double(), likeliest_tokens(logits, group).double()])


def likeliest_tokens(logits: Tensor, group: Group) -> Tensor:
    """Returns the index of the largest logit, int64 [b, s], over the vocabulary that the ranks of a group divide."""
    largest, index = logits.max(dim=-1)
    if group_size(group) == 1:
        return index
    index = index + group_rank(group) * logits.shape[-1]
    own = torch.stack([largest.double(), index.double()])
    values, indices = gather_rows(own[None], group).unbind(1)  # [ranks, b, s]
    return indices.gather(0, values.argmax(0, keepdim=True))[0].long()
