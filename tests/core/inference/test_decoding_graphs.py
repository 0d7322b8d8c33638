"""Decoding steps that are replayed write the texts that eager steps write."""

import pytest
import torch
from support.generating_models import MODELS, build
from support.graph_recorder import OperationRecorder

from megatron.core.inference.call_channel import CallChannel
from megatron.core.inference.decoding_graphs import DecodingGraphs, _size_for
from megatron.core.inference.engine import Engine, Progress, TextRequest
from megatron.core.inference.generation import generate
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext, RowPart
from megatron.core.inference.sampling import GREEDY, SamplingParams, TextSoFar

PROMPTS = [[3, 7, 1], [5], [9, 2, 8, 30, 11, 4, 1, 1, 6, 20], [6, 6], [12, 13, 14, 15, 16]]


def write(model, recorder, sampling=GREEDY, warn=pytest.fail) -> list[list[int]]:
    """Each text begins two steps after the one before, if one of 3 slots is free."""
    forward, context = LayoutForward(model), PagedInferenceContext(20, 2, 3, 24)
    graphs = DecodingGraphs(forward, context, recorder, warn)
    engine = Engine(forward, context, CallChannel(None), prefill_tokens=4, graphs=graphs)
    heard: list[list[Progress]] = []
    for number, prompt in enumerate(PROMPTS):
        heard.append([])
        engine.submit(TextRequest(TextSoFar(sampling, prompt, [], (), number), 12, heard[-1].append))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    return [[each.token.token for each in told if each.token is not None] for told in heard]


def eager(model, sampling=GREEDY) -> list[list[int]]:
    return [generate(model, [prompt], 12, sampling, first_sequence=row)[0] for row, prompt in enumerate(PROMPTS)]


@pytest.mark.fast("rope, grouped", "hybrid")
@pytest.mark.parametrize("name", MODELS)
def test_replayed_texts_are_those_of_single_runs(name: str) -> None:
    model, recorder = build(*MODELS[name]), OperationRecorder()
    assert write(model, recorder) == eager(model)
    assert recorder.captured >= 3 and recorder.replayed > 10, "sizes of rows and pages"


def test_samples_are_those_of_single_runs() -> None:
    model, recorder = build({}, {}), OperationRecorder()
    sampling = SamplingParams(1.3, top_p=0.9, seed=5, repetition_penalty=1.2)
    assert write(model, recorder, sampling) == eager(model, sampling)
    assert recorder.replayed > 10


def test_a_model_that_waits_for_the_device_runs_eagerly() -> None:
    model, recorder, told = build({}, {}), OperationRecorder(), []
    inner = model.decoder.forward

    def waits(hidden, **more):
        float(hidden.sum())
        return inner(hidden, **more)

    expected = eager(model)
    model.decoder.forward = waits
    assert write(model, recorder, warn=told.append) == expected
    assert recorder.captured == 1 and not recorder.replayed and len(told) == 1 and "not permitted" in told[0]


def test_capacities_count_no_repeated_rows() -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
    model = build({**experts, "moe_expert_capacity_factor": 1.0}, {})
    recorder = OperationRecorder()
    write(model, recorder)
    assert not recorder.warmed and not recorder.captured


def test_sizes() -> None:
    assert [_size_for(count, 1, 6) for count in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
    assert [_size_for(count, 8, 20) for count in (1, 8, 9, 17, 20)] == [8, 8, 16, 20, 20]


def test_repeated_rows_write_nothing_new() -> None:
    """A row of another slot keeps its keys while two rows take three places."""
    model, recorder = build(*MODELS["hybrid"]), OperationRecorder()
    context = PagedInferenceContext(20, 2, 4, 24)
    forward = LayoutForward(model)
    rows = [RowPart(slot, 0, (slot + 1, 5), (1 + 2 * slot, 2 + 2 * slot)) for slot in range(4)]
    tokens, positions = context.begin(rows, forward.device)
    forward(tokens, positions, context)
    before = {owner: tuple(pool.clone() for pool in pools) for owner, pools in context._pools.items()}
    states = {owner: state.clone() for owner, state in context._states.items()}
    parts = [RowPart(slot, 2, (7,), (1 + 2 * slot, 2 + 2 * slot)) for slot in (2, 0, 1)]
    graphs = DecodingGraphs(forward, context, recorder, pytest.fail)
    assert graphs.logits_of(parts).shape[0] == 3
    for owner, pools in context._pools.items():
        for pool, old in zip(pools, before[owner], strict=True):
            changed = (pool != old).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert set(changed) <= {(2 + 2 * slot) * 2 for slot in (2, 0, 1)} and not pool[:2].any()
    for owner, state in context._states.items():
        assert torch.equal(state[3], states[owner][3]) and not torch.equal(state[1], states[owner][1])
