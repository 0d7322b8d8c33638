"""Continuing prompts with a cache equals computing everything again; rows do not depend on each other."""

import pytest
import torch
from support.generating_models import MODELS, build
from support.pool import Pool
from support.tiny_models import tiny_config

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.inference.generation import fill_up, generate
from megatron.core.inference.sampling import GREEDY, SamplingParams
from megatron.core.inference.static_context import InferenceParams, StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

PROMPTS = [[3, 7, 1], [5], [9, 2, 8, 30, 11, 4], [6, 6]]


def again_and_again(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.fast("rope, grouped", "window", "ALiBi, bounded, a gate", "gated delta nets", "hybrid")
@pytest.mark.parametrize("name", MODELS)
def test_cache_equals_full_computation(name: str) -> None:
    model = build(*MODELS[name])
    expected = [again_and_again(model, prompt, 9) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 2  # rows that agree by having nothing to say would prove little
    assert generate(model, PROMPTS, 9, GREEDY) == expected


def as_older_scripts_write(model: GPTModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The loop of scripts that count the tokens: all rows are read as far as the shortest prompt, then grow together,
    and longer prompts keep their own tokens."""
    lengths, total = torch.tensor([len(prompt) for prompt in prompts]), max(map(len, prompts)) + count
    tokens = torch.nn.functional.pad(fill_up(prompts), (0, count))
    positions = torch.arange(total).expand(len(prompts), -1)
    hidden = torch.ones(1, 1, total, total, dtype=torch.bool).triu(1)
    params, before = InferenceParams(len(prompts), total), 0
    for end in range(int(lengths.min()), total):
        now = slice(before, end)
        logits = model(tokens[:, now], positions[:, now], hidden[..., now, :end], inference_params=params)
        assert logits.shape[:2] == (len(prompts), end - before)
        params.sequence_len_offset += end - before
        tokens[:, end] = torch.where(lengths <= end, logits[:, -1].argmax(-1), tokens[:, end])
        before = end
    return [row[len(prompt) : len(prompt) + count] for row, prompt in zip(tokens.tolist(), prompts, strict=True)]


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_script_that_counts_the_tokens_writes_the_same(name: str) -> None:
    model = build(*MODELS[name])
    assert as_older_scripts_write(model, PROMPTS, 9) == generate(model, PROMPTS, 9, GREEDY)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_parts_of_a_row(name: str) -> None:
    """Without position ids, which follow from the offset."""
    model = build(*MODELS[name])
    ids = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(1))
    whole, params, last = model(ids), InferenceParams(2, 12), StaticInferenceContext(2, 12)
    for start, end in ((0, 5), (5, 9), (9, 10), (10, 12)):
        close(model(ids[:, start:end], inference_params=params), whole[:, start:end])
        params.increment_sequence_len_offset(end - start)
        close(model(ids[:, start:end], inference_context=last), whole[:, end - 1 : end])
        last.increment_sequence_len_offset(end - start)


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache(name: str) -> None:
    model = build(*MODELS[name])
    ids = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    lengths = torch.tensor([5, 3])
    context = StaticInferenceContext(2, 12)
    logits = model(ids[:, :5], context.begin(lengths, 5).expand(2, -1), inference_context=context)
    close(logits[:, 0], whole[torch.arange(2), lengths - 1])
    for step in range(7):
        at = lengths + step
        logits = model(ids[torch.arange(2), at][:, None], context.advance(), inference_context=context)
        close(logits[:, 0], whole[torch.arange(2), at])


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert (ours - expected).abs().max() < 1e-11 * expected.abs().max()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, top_k=9), SamplingParams(1.5, top_p=0.8, seed=7)])
def test_a_batch_equals_its_rows(sampling: SamplingParams) -> None:
    model = build({}, {})
    together = generate(model, PROMPTS, 9, sampling)
    alone = [generate(model, [p], 9, sampling, first_sequence=number)[0] for number, p in enumerate(PROMPTS)]
    assert together == alone


def test_draws_depend_on_the_seed_and_the_sequence() -> None:
    model = build({}, {})
    runs = [generate(model, [[3]] * 3, 9, SamplingParams(seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(row) for row in runs[0]}) == 3


def test_a_row_stops_at_the_first_end_token() -> None:
    model = build({}, {})
    free = generate(model, PROMPTS, 9, GREEDY)
    ends = (free[0][4], free[1][2])
    stopped = generate(model, PROMPTS, 9, GREEDY, ends=ends)
    for row, whole in zip(stopped, free, strict=True):
        assert row == whole[: min((whole.index(end) for end in ends if end in whole), default=9)]
    assert len(stopped[0]) <= 4 and len(stopped[1]) <= 2


def test_a_prompt_without_tokens_is_refused() -> None:
    model = build({}, {})
    with pytest.raises(UserError, match="has no tokens"):
        generate(model, [[1], []], 3, GREEDY)


def test_rows_in_several_calls_and_in_another_order() -> None:
    """Scripts with pipelines and with beam search do so."""
    model, ids = build({}, {}), torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(2))
    whole, context = model(ids), InferenceParams(4, 8)
    for rows in (slice(0, 3), slice(3, 4)):
        close(model(ids[rows, :5], inference_params=context), whole[rows, :5])
        context.increment_batch_size_offset(rows.stop - rows.start)
    context.reset_batch_size_offset()
    context.sequence_len_offset += 5
    close(model(ids[:, 5:6], inference_params=context), whole[:, 5:6])
    order = torch.tensor([2, 0, 0, 3])
    context.sequence_len_offset += 1
    context.swap_key_value_dict(order)
    close(model(ids[order, 6:7], inference_params=context), whole[order, 6:7])
    context.sequence_len_offset = 3  # tokens are replaced by others
    close(model(ids[order, 3:], inference_params=context), whole[order, 3:])
    assert context.key_value_memory_dict[3][0].shape == (8, 4, 4, 4)
    context.reset()
    close(model(ids[:2], inference_params=context), whole[:2])


def test_masks_of_a_call() -> None:
    model, ids = build({}, {}), torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(3))
    hidden = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    hidden[1, :, 4:, 1:3] = True
    whole, context = model(ids, attention_mask=hidden), InferenceParams(2, 8)
    assert (whole - model(ids)).abs().max() > 0.1
    for start, end in ((0, 3), (3, 7), (7, 8)):
        found = model(ids[:, start:end], None, hidden[:, :, start:end, :end], inference_params=context)
        close(found, whole[:, start:end])
        context.sequence_len_offset += end - start
    with pytest.raises(UserError, match=r"attention_mask of shape \[2, 1, 8, 8\] .*: 3 tokens after 0 take .* 3, 3\]"):
        model(ids[:, :3], None, hidden, inference_params=InferenceParams(2, 8))


def test_tokens_that_are_counted_wrongly_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = build({}, {}), torch.zeros(2, 4, dtype=torch.int64)
    context = InferenceParams(2, 6)
    with pytest.raises(UserError, match=r"2 rows from row 1 on, of 0 \+ 4 tokens, do not fit .* of 2 x 6; make"):
        context.batch_size_offset = 1
        model(ids, inference_params=context)
    context.reset()
    model(ids, inference_params=context)
    model(ids[:, :1], inference_params=context)
    assert "has sequence_len_offset 0 in two calls, with 4 and 1 tokens: the second replace the first" in caplog.text
    context.sequence_len_offset = 5
    with pytest.raises(UserError, match="sequence_len_offset 5: the context holds 1 tokens of these rows"):
        model(ids[:, :1], inference_params=context)
    with pytest.raises(UserError, match="call begin"):
        context.advance()
    context.begin(torch.tensor([4, 4]), 4)
    context.sequence_len_offset = 1
    with pytest.raises(UserError, match=r"begin\(\) and advance\(\) count the tokens of this context"):
        model(ids, inference_params=context)
    with pytest.raises(UserError, match="swap_key_value_dict with 1 rows: it takes max_batch_size 2"):
        context.swap_key_value_dict(torch.tensor([0]))


def test_a_state_follows_the_tokens_in_order() -> None:
    model, ids = build(*MODELS["hybrid"]), torch.zeros(2, 4, dtype=torch.int64)
    context = InferenceParams(2, 6)
    model(ids, inference_params=context)
    context.sequence_len_offset = 2
    with pytest.raises(UserError, match="after 4 tokens of the rows 0 to 1, but the call has sequence_len_offset 2"):
        model(ids, inference_params=context)


def logits_of_a_rank() -> list[torch.Tensor]:
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), torch.distributed.get_rank())
    config = tiny_config(num_layers=1, tensor_model_parallel_size=2)
    model = GPTModel(config, get_gpt_layer_local_spec(), 36, 24, pg_collection=groups).eval()
    ids = torch.arange(6)[None]
    asked = model(ids, inference_params=InferenceParams(1, 6), runtime_gather_output=True)
    whole = model(ids, runtime_gather_output=True)
    return [asked.detach(), whole.detach(), model(ids, inference_params=InferenceParams(1, 6)).detach()]


def test_logits_are_gathered_where_the_script_says_so(pool: Pool) -> None:
    for rank, (asked, whole, own) in enumerate(pool.run(logits_of_a_rank, 2)):
        close(asked, whole)
        close(own, whole[..., rank * 18 : rank * 18 + 18])


def test_frequencies_that_depend_on_the_row_want_rows_that_stay_short() -> None:
    scaling = {"rope_scaling_type": "dynamic", "rope_scaling_original_length": 12}
    model = build(scaling, {"position_embedding_type": "rope"})
    assert generate(model, PROMPTS, 6, GREEDY) == [again_and_again(model, prompt, 6) for prompt in PROMPTS]
    with pytest.raises(UserError, match=r"context of 13 tokens is longer than 12 \(rope_scaling_original_length\)"):
        generate(model, PROMPTS, 7, GREEDY)
