"""A job for a worker that writes into a temporary folder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.preparation.blocks import Plan, plan_blocks
from megatron.data.preparation.inputs import find_inputs
from megatron.data.preparation.messages import Job
from megatron.data.tokenizer.null import NullTokenizer


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """Makes a job over files of these lines. A line is a dictionary, or bytes as they are."""

    def make(*files: Sequence[Any], **settings: Any) -> Job:
        paths = []
        for number, lines in enumerate(files):
            path = tmp_path / f"input{number}.jsonl"
            texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
            path.write_bytes(b"".join(text + b"\n" for text in texts))
            paths.append(str(path))
        plan = plan_blocks(find_inputs(paths), workers=1) if paths else Plan((), (), 1)
        chosen: dict[str, Any] = {"keys": ("text",), "partitions": 1, "eod": None, "on_error": "stop"}
        chosen |= {"longest_line": 1000, "dtype": np.uint16, "folder": tmp_path, "plan": plan}
        return Job(tokenizer=NullTokenizer(50), **(chosen | settings))

    return make
