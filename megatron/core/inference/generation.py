"""The generation loop: continues prompts token by token."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.sampling import SamplingParams, TextSoFar, next_tokens
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
    `ends`, which is not part of its result. The model is a GPTModel, or this rank's part of it; it stays in evaluation
    mode afterwards. The result of a row does not depend on the other rows. `first_sequence` is the index of the first
    prompt among all prompts that are continued with this seed. All ranks of a layout call it with the same arguments
    and get the same result."""
    if not all(prompts):
        raise UserError("a prompt has no tokens; a model needs one to continue from")
    forward = LayoutForward(model)
    device = forward.device
    lengths = [len(prompt) for prompt in prompts]
    context = StaticInferenceContext(len(prompts), max(lengths) + max_new_tokens)
    tokens = fill_up(prompts).to(device)
    positions = context.begin(torch.tensor(lengths, device=device), tokens.shape[1])
    texts = [TextSoFar(sampling, prompt, [], ends, first_sequence + row) for row, prompt in enumerate(prompts)]

    def choose(newest: Tensor | None) -> Tensor:
        ids, at = (tokens, positions) if newest is None else (newest[:, None], context.advance())
        logits = forward(ids, at.expand(len(prompts), -1), context)
        return forward.agree(next_tokens(logits[:, -1], texts))

    return write(texts, max_new_tokens, ends, choose)


def write(
    texts: Sequence[TextSoFar], max_new_tokens: int, ends: Collection[int], choose: Callable[[Tensor | None], Tensor]
) -> list[list[int]]:
    """Adds up to `max_new_tokens` ids to each text, and stops when all texts have one of `ends`. Returns the ids before
    it. `choose` returns the next ids, int64 [b], after those of the step before, or None in the first step."""
    rows: list[list[int]] = [[] for _ in texts]
    finished = [False] * len(texts)
    newest: Tensor | None = None
    for _ in range(max_new_tokens):
        newest = choose(newest)
        for number, token in enumerate(newest.tolist()):
            texts[number].written.append(token)
            finished[number] |= token in ends
            if not finished[number]:
                rows[number].append(token)
        if all(finished):
            break
    return rows


def fill_up(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Returns the prompts as int64 [b, longest], padded on the right with zeros."""
    return nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
