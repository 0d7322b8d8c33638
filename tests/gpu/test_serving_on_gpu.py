"""Decoding steps as CUDA graphs write the texts of eager steps."""

import pytest
import torch
from support.generating_models import MODELS, build

from megatron.core.inference.call_channel import CallChannel
from megatron.core.inference.decoding_graphs import DecodingGraphs
from megatron.core.inference.engine import Engine, Progress, TextRequest
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext
from megatron.core.inference.sampling import GREEDY, SamplingParams, TextSoFar
from megatron.core.utils.graph_capture import CudaGraphRecorder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[3, 7, 1], [5], [9, 2, 8, 30, 11, 4, 1, 1, 6, 20], [6, 6], [12, 13, 14, 15, 16]]
MUST_CAPTURE = "rope, grouped", "learned", "latent"


def write(engine: Engine) -> list[list[int]]:
    """Greedy and sampled texts; each begins two steps after the one before, if one of 3 slots is free."""
    heard: list[list[Progress]] = []
    for number, prompt in enumerate(PROMPTS):
        heard.append([])
        sampling = SamplingParams(1.3, seed=5) if number % 2 else GREEDY
        engine.submit(TextRequest(TextSoFar(sampling, prompt, [], (), number), 12, heard[-1].append))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    return [[each.token.token for each in told if each.token is not None] for told in heard]


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_graphs_are_those_of_eager_steps(name: str) -> None:
    forward, told = LayoutForward(build(*MODELS[name]).to("cuda")), []
    context = PagedInferenceContext(20, 2, 3, 24)
    expected = write(Engine(forward, context, CallChannel(None), prefill_tokens=4))
    assert len(set(map(tuple, expected))) > 2
    recorder = CudaGraphRecorder(torch.device("cuda", torch.cuda.current_device()))
    context = PagedInferenceContext(20, 2, 3, 24)
    graphs = DecodingGraphs(forward, context, recorder, told.append)
    assert write(Engine(forward, context, CallChannel(None), prefill_tokens=4, graphs=graphs)) == expected
    captured = sum(size.graph is not None for size in graphs._sizes.values())
    assert (captured >= 3 and not told) or (name not in MUST_CAPTURE and told), told
