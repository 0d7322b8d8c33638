"""Imports for the server of test processes (`support.forkserver`): each process of a test starts with these modules."""

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import os
import sys
import weakref
from pathlib import Path

_ROOT = Path(__file__).parents[2]

MODULES = (
    "numba",
    "pytest",
    "torch",
    "torch._dynamo",  # recompute and torch.optim import it at their first call, which takes a second
    "torch.distributed.run",
    "megatron.facades.training",
    "pretrain_gpt",
    "parity.mutated",
    "support.runs",
)


def _preload() -> None:
    gc.disable()  # until the end: nearly all objects stay
    sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]
    for name in MODULES:
        importlib.import_module(name)
    import torch
    from support import huge_pages, mock_data

    torch.set_num_threads(1)
    # A fork makes torch's thread pool anew at its first use. If two threads use it at once, one finds none: "Invalid
    # thread pool". In a new process there is only one thread.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    mock_data.make_small()
    _load_kernels()
    _fill_caches()
    # Forked processes then do not copy the pages of these objects at their first collection.
    gc.collect()
    gc.freeze()
    gc.enable()
    huge_pages.collapse()
    # A program need not take apart at its end what the server has made.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # The server ends without taking modules apart: triton's extension would report leaks on stderr.
    server = os.getpid()
    atexit.register(lambda: os._exit(0) if os.getpid() == server else None)


def _load_kernels() -> None:
    """Loads the machine code of dropout masks and of GPT's data, which numba takes from its cache at the first call."""
    import numpy as np
    import torch

    from megatron.core.ops.dropout.dropout import Draw
    from megatron.core.ops.dropout.dropout_cpu import keep_rows_compiled
    from megatron.data.datasets.index_building import SamplePlan, build_indices

    rows = torch.zeros(1, dtype=torch.int64)
    keep_rows_compiled(Draw((0, 0), torch.zeros((), dtype=torch.int64), 0.5), rows, rows, rows, 4)
    build_indices(range(2), np.array([4, 4], np.int32), SamplePlan(1, 3, None, 2, 1), seed=0)


def _fill_caches() -> None:
    """Does what takes longer the first time: trains a tiny model, which collects all flags, among others; looks up the
    classes of characters; lets `inspect`, which torchrun calls often, find the files of all modules."""
    import torch
    from support.runs import TINY, train

    from megatron.core.utils import warn
    from megatron.data.tokenizer.byte_level import classes_of_code_points

    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        train("--mock-data --train-iters 1", base=TINY)
    warn.leave_out(())
    warn._warn_once.cache_clear()
    classes_of_code_points()
    inspect.stack()


_preload()
