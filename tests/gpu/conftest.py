"""What a test of a GPU changes in its process is undone, so that the tests may run in any order."""

import os
from collections.abc import Iterator

import pytest
import torch


def _share_gpus() -> None:
    """Lets each of xdist's workers see this machine's GPUs in an order of its own, so that all are used."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    present = torch.cuda.device_count()
    if worker % max(present, 1) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        order = [str((worker + number) % present) for number in range(present)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(order)


_share_gpus()


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own() -> Iterator[None]:
    """Begins with the same random numbers and settings of torch. A test that leaves a capture of a CUDA graph behind
    fails, and does so itself: otherwise later tests that draw random numbers would."""
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    yield
    if not torch.cuda.is_initialized():
        return
    torch.cuda.set_sync_debug_mode("default")
    if torch.cuda.is_current_stream_capturing() or torch.cuda.current_stream() != torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.default_stream())
        pytest.fail("the test left another stream than the default one, or a capture that has not ended")
    try:
        torch.rand(1, device="cuda")
    except RuntimeError as error:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        pytest.fail(f"the test left a generator that draws no numbers: {error}")
