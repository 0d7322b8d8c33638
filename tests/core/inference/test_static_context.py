"""The cache of keys and values: what rows of different lengths see."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.inference.static_context import StaticInferenceContext


def numbered(length: int, rows: int, first: int = 0) -> torch.Tensor:
    """[s, b, 1, 1] with distinct numbers."""
    return (torch.arange(length * rows) + first).view(length, rows, 1, 1).float()


def test_a_row_grows_behind_its_own_last_token() -> None:
    context = StaticInferenceContext(2, 5)
    assert torch.equal(context.begin(torch.tensor([1, 3]), filled_to=3), torch.tensor([[0, 1, 2]]))
    prompt = numbered(3, 2)
    seen = context.extend(1, prompt, prompt + 100)
    assert seen.query_positions is None and torch.equal(seen.key, prompt)
    assert torch.equal(context.select_last(prompt[:, :, 0]), torch.tensor([[[0.0], [5.0]]]))
    assert torch.equal(context.advance(), torch.tensor([[1], [3]]))
    new = numbered(1, 2, first=50)
    seen = context.extend(1, new, new + 100)
    assert seen.query_positions is not None and torch.equal(seen.query_positions, torch.tensor([[1], [3]]))
    assert seen.key[:, 0, 0, 0].tolist() == [0, 50, 4, 0]  # padding is overwritten; what is left is not attended to
    assert seen.key[:, 1, 0, 0].tolist() == [1, 3, 5, 51] and torch.equal(seen.value[3, 1], seen.key[3, 1] + 100)
    hidden = torch.ones(1, 2, 4)
    assert context.select_last(hidden) is hidden


def test_states_are_kept_until_the_next_prompts() -> None:
    context = StaticInferenceContext(2, 5)
    context.begin(torch.tensor([1, 3]), filled_to=3)
    assert context.recall(1, "state") is None and context.token_counts().tolist() == [1, 3]
    context.remember(1, "state", torch.ones(2))
    context.advance()
    assert context.token_counts().tolist() == [1, 1] and torch.equal(context.recall(1, "state"), torch.ones(2))
    assert context.recall(1, "window") is None and context.recall(2, "state") is None
    context.begin(torch.tensor([2, 2]), filled_to=2)
    assert context.recall(1, "state") is None


def test_what_does_not_fit_is_refused() -> None:
    context = StaticInferenceContext(2, 4)
    with pytest.raises(UserError, match="3 prompts of up to 2 tokens do not fit into a context of 2 x 4"):
        context.begin(torch.ones(3, dtype=torch.int64), 2)
    context.begin(torch.tensor([4]), 4)
    with pytest.raises(UserError, match="the context is full: max_sequence_length 4"):
        context.advance()


def test_megatron_lms_questions() -> None:
    context = StaticInferenceContext(2, 5)
    assert context.is_static_batching() and not context.is_dynamic_batching() and not context.is_decode_only()
    context.enable_decode_mode()
    assert context.is_decode_only()
    context.enable_prefill_mode()
    assert not context.decode_mode and context.key_value_memory_dict == {}
