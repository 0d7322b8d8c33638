"""Direct preference optimisation:   torchrun --nproc_per_node 2 examples/frozen_reference/train_dpo.py --pairs FILE ...

    loss = -log sigmoid(beta ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected))))

p is the model that trains and r a frozen reference (Rafailov et al. 2023, arXiv:2305.18290); log p(answer) is the sum
over the answer's tokens. The reference is the model of --pretrained-checkpoint, from which training starts too. A line
of FILE is {"prompt": ..., "chosen": ..., "rejected": ...}. Rows of a micro-batch alternate: chosen, rejected.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.frozen_reference.frozen import frozen_model
from megatron.core.exceptions import UserError
from megatron.training import pretrain
from megatron.training.data.batch import Batch
from megatron.training.data.step_data import StepData
from megatron.training.providers import Context, ForwardStep, LossFunction, Providers, SampleCounts
from pretrain_gpt import build_model, describe_tokens

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class PreferencePairs:
    """Rows of token ids: row 2 i has the chosen answer of pair i, row 2 i + 1 the rejected one. Pairs repeat."""

    def __init__(self, pairs: Sequence[Sequence[Sequence[int]]], end: int, length: int, count: int) -> None:
        """`pairs` are (prompt, chosen, rejected) as token ids; `end` is the token after an answer."""
        self.count, self.rows = (
            count,
            [self._row(list(prompt), [*answer, end], length) for prompt, *answers in pairs for answer in answers],
        )

    @staticmethod
    def _row(prompt: list[int], answer: list[int], length: int) -> dict[str, Tensor]:
        ids = torch.tensor([*prompt, *answer])
        if len(ids) > length + 1:
            raise UserError(f"--pairs: a pair has {len(ids)} tokens; give --seq-length {len(ids) - 1} or more")
        row = F.pad(ids, (0, length + 1 - len(ids)), value=answer[-1])
        position = torch.arange(length)
        learned = (position >= len(prompt) - 1) & (position < len(ids) - 1)
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": learned.float(), "position_ids": position}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int | None) -> dict[str, Tensor]:
        row = self.rows[(number or 0) % len(self.rows)]
        return {**row, "sample_id": torch.tensor(-1 if number is None else number)}


def read_pairs(path: str, context: Context) -> list[tuple[list[int], ...]]:
    """Reads and tokenizes a file of pairs. Raises UserError that names the line."""
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            texts = [json.loads(line)[key] for key in ("prompt", "chosen", "rejected")]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{path}, line {number}: expected "prompt", "chosen" and "rejected" ({error!r})') from None
        found.append(tuple(context.tokenizer.tokenize(text) for text in texts))
    return found


def build_datasets(context: Context, counts: SampleCounts) -> Sequence[object]:
    """Returns the pairs as training data."""
    path = context.config.extra["pairs"]
    if path is None:
        raise UserError("--pairs is missing: a file of preference pairs")
    if (context.config.training.micro_batch_size or 0) % 2:
        raise UserError("--micro-batch-size must be even: a pair has two rows")
    length = context.config.data.seq_length or 0
    return PreferencePairs(read_pairs(path, context), context.tokenizer.eod, length, counts.train), None, None


def dpo_loss(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns the loss and the margin of each pair: [pairs], for log-likelihoods of rows [2 pairs]."""
    gain = (policy - reference).view(-1, 2)
    margin = beta * (gain[:, 0] - gain[:, 1])
    return -F.logsigmoid(margin), margin


def build_forward_step(context: Context) -> ForwardStep:
    """Returns the forward step: the losses of all tokens by the model, and those by the reference."""
    device, beta = context.environment.device, context.config.extra["dpo_beta"]
    reference = frozen_model(context, context.config.checkpoint.pretrained_checkpoint, "--pretrained-checkpoint")

    def forward_step(data: StepData, model: nn.Module) -> tuple[Tensor, LossFunction]:
        rows = next(data)  # datasets of a script come as dictionaries
        batch = Batch(**{name: rows[name] for name in _FIELDS}).to(device, non_blocking=True)
        inputs = batch.tokens, batch.position_ids, batch.attention_mask
        with torch.no_grad():
            theirs = reference(*inputs, labels=batch.labels)
        tokens = describe_tokens(batch, data, None, batch.tokens.shape[1])

        def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            policy, fixed = (-(each * batch.loss_mask).sum(1) for each in (losses, theirs))
            pairs, margins = dpo_loss(policy, fixed, beta)
            total, count = pairs.sum(), torch.tensor(len(pairs), device=device)
            report = {"lm loss": total.detach(), "margin": margins.detach().sum()}
            return total, count, {name: torch.stack([value, count.to(value.dtype)]) for name, value in report.items()}

        return model(*inputs, labels=batch.labels, loss_mask=batch.loss_mask, tokens=tokens), loss_func

    return forward_step


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of this script."""
    group = parser.add_argument_group("preferences")
    group.add_argument("--pairs", help="JSON lines with prompt, chosen and rejected.")
    group.add_argument("--dpo-beta", type=float, default=0.1, help="How strongly the model is held to the reference.")
    return parser


PROVIDERS = Providers(build_model, build_datasets, build_forward_step)
DEFAULTS: dict[str, Any] = {"model_family": "gpt", "datasets_of_script": True}

if __name__ == "__main__":
    pretrain(PROVIDERS, extra_args_provider=add_flags, args_defaults=DEFAULTS)
