"""What a step tells reaches the texts' loop at once."""

import asyncio
from types import SimpleNamespace

import torch

from megatron.core.inference.engine import Progress, ScoredToken
from megatron.core.inference.sampling import GREEDY, TextSoFar
from megatron.serving.engine_thread import EngineThread


class TwoSteps:
    """An engine that waits for three texts, and then ends them in two steps."""

    forward = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self) -> None:
        self.requests: list = []
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return len(self.requests) == 3 and self.steps < 2

    def submit(self, request) -> None:
        self.requests.append(request)

    def step(self) -> None:
        self.steps += 1
        for number, request in enumerate(self.requests):
            request.tell(Progress(ScoredToken(10 * self.steps + number), finish="length" if self.steps == 2 else None))

    def fail(self, why: str) -> None:
        pass

    idle = cancel = stop = lambda self, *arguments: None


def test_a_step_wakes_the_loop_once() -> None:
    wakes = []

    async def run() -> list[list[int]]:
        loop, thread = asyncio.get_running_loop(), EngineThread(TwoSteps(), lambda: None)
        inner = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *arguments: wakes.append(arguments) or inner(*arguments)
        thread.start()

        async def written() -> list[int]:
            text = TextSoFar(GREEDY, [1])
            return [each.token.token async for each in thread.write(text, 2, None, False)]

        found = await asyncio.gather(*(written() for _ in range(3)))
        thread.stop()
        thread.join(60)
        return found

    assert asyncio.run(run()) == [[10, 20], [11, 21], [12, 22]]
    assert len(wakes) == 2
