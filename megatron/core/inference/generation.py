"""The generation loop: continues prompts token by token."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.inference.sampling import SamplingParams, next_tokens
from megatron.core.inference.static_context import StaticInferenceContext


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    *,
    ends: Collection[int] = (),
    first_sequence: int = 0,
) -> list[list[int]]:
    """Continues each prompt by up to `max_new_tokens` ids and returns the new ids; a row stops at any of the ids
    `ends`, which is not part of its result. The model is a GPTModel; it stays in evaluation mode afterwards. The result
    of a row does not depend on the other rows. `first_sequence` is the index of the first prompt among all prompts that
    are continued with this seed."""
    if not all(prompts):
        raise UserError("a prompt has no tokens; a model needs one to continue from")
    model.eval()
    device = next(model.parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    context = StaticInferenceContext(len(prompts), max(lengths) + max_new_tokens)
    numbers = list(range(first_sequence, first_sequence + len(prompts)))
    tokens = fill_up(prompts).to(device)
    positions = context.begin(torch.tensor(lengths, device=device), tokens.shape[1])
    written: list[Tensor] = []
    last = torch.tensor(list(ends), dtype=torch.long, device=device)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        logits = model(tokens, positions.expand(len(prompts), -1), inference_context=context)
        chosen = next_tokens(logits[:, -1], sampling, numbers, step)
        written.append(chosen)
        if ends:
            finished |= torch.isin(chosen, last)
            if finished.all():
                break
        if step + 1 < max_new_tokens:
            tokens, positions = chosen[:, None], context.advance()
    rows = torch.stack(written, 1).tolist() if written else [[] for _ in prompts]
    return [until_end(row, ends) for row in rows]


def until_end(row: list[int], ends: Collection[int]) -> list[int]:
    """Returns the ids before the first of `ends`."""
    return next((row[:index] for index, number in enumerate(row) if number in ends), row)


def fill_up(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Returns the prompts as int64 [b, longest], padded on the right with zeros."""
    return nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
