"""Texts that begin and end at different times are the texts that are written alone."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.generating_models import DELTA, MODELS, build, build_in_layout
from support.graph_recorder import REFUSED
from support.pool import Pool

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.inference.call_channel import CallChannel, follow
from megatron.core.inference.engine import Engine, Progress, ScoredToken, TextRequest
from megatron.core.inference.generation import generate
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext
from megatron.core.inference.sampling import GREEDY, SamplingParams, TextSoFar
from megatron.core.utils.torch_private import TorchDispatchMode

PROMPTS = [[3, 7, 1], [5], [9, 2, 8, 30, 11, 4, 1, 1, 6, 20], [6, 6], [12, 13, 14, 15, 16]]


@dataclass
class Told:
    """A text, and what the engine told about it."""

    request: TextRequest = field(init=False)
    heard: list[Progress] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [progress.token.token for progress in self.heard if progress.token is not None]

    @property
    def finish(self) -> str | None:
        return self.heard[-1].finish if self.heard else None


def engine_of(model, pages: int = 40, slots: int = 3, prefill_tokens: int = 4, channel=None) -> Engine:
    context = PagedInferenceContext(pages, 2, slots, 24)
    return Engine(LayoutForward(model), context, channel or CallChannel(None), prefill_tokens=prefill_tokens)


def ask(engine: Engine, prompt: list[int], sampling=GREEDY, new: int = 8, sequence: int = 0, ends=(), **more) -> Told:
    told = Told()
    text = TextSoFar(sampling, prompt, [], ends, sequence)
    told.request = TextRequest(text, new, told.heard.append, **more)
    engine.submit(told.request)
    return told


def write(engine: Engine, prompts=PROMPTS, **more) -> list[list[int]]:
    """Each text begins two steps after the one before, if there is a slot."""
    told = []
    for number, prompt in enumerate(prompts):
        told.append(ask(engine, prompt, sequence=number, **more))
        engine.step()
        engine.step()
    for _ in range(200):
        if not engine.has_work:
            break
        engine.step()
    assert engine.num_used_pages == engine.num_running == engine.num_waiting == 0
    return [each.tokens for each in told]


@pytest.mark.fast("rope, grouped", "window", "hybrid", "latent")
@pytest.mark.parametrize("name", MODELS)
def test_texts_of_a_batch_are_those_of_single_runs(name: str) -> None:
    """Prompts are longer than what a step computes at once."""
    model = build(*MODELS[name])
    expected = [generate(model, [prompt], 8, GREEDY)[0] for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) > 2
    assert write(engine_of(model)) == expected


def test_samples_do_not_depend_on_the_batch() -> None:
    model, sampling = build({}, {}), SamplingParams(1.3, top_p=0.9, seed=5, repetition_penalty=1.2)
    expected = generate(model, PROMPTS, 8, sampling)
    assert write(engine_of(model), sampling=sampling) == expected


def test_a_lack_of_pages_delays_texts_and_changes_none() -> None:
    model = build(*MODELS["hybrid"])
    expected = [generate(model, [prompt], 8, GREEDY)[0] for prompt in PROMPTS]
    engine = engine_of(model, pages=12)
    admitted = itertools.count()
    inner = engine._admit

    def admit() -> None:
        before = engine.num_running
        inner()
        for _ in range(engine.num_running - before):
            next(admitted)

    engine._admit = admit
    assert write(engine) == expected
    assert next(admitted) > len(PROMPTS), "no text gave its pages back"


def test_a_text_that_is_cancelled_frees_its_pages() -> None:
    model = build({}, {})
    engine = engine_of(model)
    kept, left, waiting = (ask(engine, prompt, new=10) for prompt in PROMPTS[:3])
    more = ask(engine, PROMPTS[3])
    for _ in range(3):
        engine.step()
    used = engine.num_used_pages
    engine.cancel(left.request)
    engine.cancel(more.request)
    engine.step()
    assert engine.num_used_pages < used and not more.heard
    while engine.has_work:
        engine.step()
    assert kept.finish == waiting.finish == "length" and left.finish is None
    assert kept.tokens == generate(model, [PROMPTS[0]], 10, GREEDY)[0]
    assert engine.num_used_pages == 0 and sorted(engine._free_pages) == list(range(1, 40))


class Waits(TorchDispatchMode):
    """Counts what would let the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in REFUSED
        return func(*args, **(kwargs or {}))

    def tolist(self, tensor: torch.Tensor) -> list:
        self.count += 1
        return self.plain(tensor)

    plain = staticmethod(torch.Tensor.tolist)


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy texts beside sampled ones, of several temperatures."""
    engine, waits = engine_of(build(*MODELS["rope, grouped"]), prefill_tokens=64), Waits()
    for number, prompt in enumerate(PROMPTS[:3]):
        ask(engine, prompt, SamplingParams(1.0 + number, top_k=number), 6, number)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.tolist(tensor))
    counts = []
    while engine.has_work:
        before = waits.count
        with waits:
            engine.step()
        counts.append(waits.count - before)
    assert counts[0] > 1, "the first step draws for many tokens, on the host"
    assert counts[1:] == [1] * 5


def test_ends_and_lengths() -> None:
    model = build({}, {})
    engine = engine_of(model)
    (free,) = generate(model, [PROMPTS[0]], 8, GREEDY)
    told = ask(engine, PROMPTS[0], ends=(free[3],))
    none = ask(engine, PROMPTS[1], new=0)
    while engine.has_work:
        engine.step()
    assert told.tokens == free[: free.index(free[3])] and told.finish == "stop"
    assert none.tokens == [] and none.finish == "length"
    with pytest.raises(UserError, match="27 tokens of prompt and text, but there is room for 24"):
        ask(engine, PROMPTS[0], new=24)
    with pytest.raises(UserError, match="11 tokens of prompt and text, but there is room for 6"):
        ask(engine_of(model, pages=4), PROMPTS[0])


def test_log_probabilities_of_prompt_and_text() -> None:
    model = build({}, {})
    engine = engine_of(model)
    told = ask(engine, PROMPTS[2], num_logprobs=2, scores_prompt=True)
    other = ask(engine, PROMPTS[0])
    while engine.has_work:
        engine.step()
    ids = [*PROMPTS[2], *told.tokens]
    assert told.tokens == generate(model, [PROMPTS[2]], 8, GREEDY)[0]
    logs = model(torch.tensor([ids])).detach().log_softmax(-1)[0]
    prompt = next(progress.prompt for progress in told.heard if progress.prompt)
    found = [*prompt, *(progress.token for progress in told.heard if progress.token is not None)]
    assert [each.token for each in found] == ids and found[0] == ScoredToken(ids[0])
    for at, each in enumerate(found[1:]):
        values, best = logs[at].topk(2)
        assert each.logprob == pytest.approx(float(logs[at, ids[at + 1]]), abs=1e-10)
        assert [token for token, _ in each.likeliest] == best.tolist()
        assert [value for _, value in each.likeliest] == pytest.approx(values.tolist(), abs=1e-10)
    assert all(progress.token is None or progress.token.logprob is None for progress in other.heard)


def test_logits_that_are_no_numbers_end_one_text_and_spoil_no_page() -> None:
    model = build({}, {"position_embedding_type": "rope"})
    engine = engine_of(model, pages=14)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[30] = float("nan")  # only the third prompt has it
    expected = [generate(model, [prompt], 8, GREEDY)[0] for prompt in PROMPTS[:2]]
    told = [ask(engine, prompt) for prompt in (PROMPTS[2], *PROMPTS[:2])]
    while engine.has_work:
        engine.step()
    assert told[0].finish == "error" and "NaN" in told[0].heard[-1].error
    again = [ask(engine, prompt) for prompt in PROMPTS[:2]]
    while engine.has_work:
        engine.step()
    assert [each.tokens for each in told[1:]] == [each.tokens for each in again] == expected


def test_a_failure_is_told_to_all() -> None:
    engine = engine_of(build({}, {}), slots=1)
    told = [ask(engine, prompt) for prompt in PROMPTS[:2]]
    engine.step()
    engine.fail("no memory")
    assert [each.heard[-1].error for each in told] == ["no memory"] * 2 and not engine.has_work


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
HYBRID = {**DELTA, "hybrid_layer_pattern": "MG*-", "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 3}
LAYOUTS = {
    "tp": ({"num_query_groups": 2}, {"tensor": 2}),
    "pp": ({}, {"pipeline": 2}),
    "tp and pp, a hybrid": (HYBRID, {"tensor": 2, "pipeline": 2}),
    "ep": (EXPERTS, {"expert": 2}),
    "ep and pp": (EXPERTS, {"expert": 2, "pipeline": 2}),
}


def texts_of_a_rank(settings: dict, sizes: dict, sampling: SamplingParams) -> tuple[list, list]:
    """What `generate` and the engine write in a layout."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups = ProcessGroupCollection.from_grid(RankGrid(world, **sizes), rank)
    model = build_in_layout(settings, groups)
    written = generate(model, PROMPTS, 8, sampling)
    channel = CallChannel(torch.distributed.group.WORLD)
    if rank:
        follow(LayoutForward(model), PagedInferenceContext(12, 2, 3, 24), channel)
        return written, written
    engine = engine_of(model, pages=12, channel=channel)
    engine.idle()
    texts = write(engine, sampling=sampling)
    engine.stop()
    return written, texts


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.mark.slow_cases("ep", "ep and pp", "tp and pp, a hybrid")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_write_the_same(name: str, pair: Pool) -> None:
    settings, sizes = LAYOUTS[name]
    sampling = SamplingParams(1.3, top_p=0.9, seed=5)
    model = build_in_layout(settings, ProcessGroupCollection.from_grid(RankGrid(1), 0))
    expected = generate(model, PROMPTS, 8, sampling)
    assert len(set(map(tuple, expected))) > 2
    ranks = math.prod(sizes.values())
    with contextlib.nullcontext(pair) if ranks == 2 else Pool(ranks) as pool:
        assert pool.run(texts_of_a_rank, ranks, settings, sizes, sampling) == [(expected, expected)] * ranks
