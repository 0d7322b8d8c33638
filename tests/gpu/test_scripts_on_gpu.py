"""What entry scripts of Megatron-LM's releases do, on GPUs: two iterations each, with the losses of a CPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import gpus, user_scripts
from support.gpus import need_room
from support.released.facts import LOOP_RELEASES, RELEASES
from support.user_scripts import FLAGS, ROOT, losses_in, programs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LOSSES = {"gpt": "lm loss", "bert": "(?:lm|sop) loss", "t5": "lm loss"}


def run(processes: int, words: Sequence[str], folder: Path, gpus: bool = True) -> list[str]:
    """Starts Python under torchrun, or plain with 0 processes, and returns what each rank printed."""
    launcher, logs = [sys.executable], folder / f"logs-{len(list(folder.iterdir()))}"
    if processes:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        launcher += ["--log-dir", str(logs), "--redirects", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*launcher, *words], cwd=folder, capture_output=True, text=True, env=environment)
    errors = [path.read_text()[-4000:] for path in sorted(logs.rglob("stderr.log"))]
    assert done.returncode == 0, "\n".join([done.stdout[-4000:], done.stderr[-4000:], *errors])
    return [path.read_text() for path in sorted(logs.rglob("stdout.log"))] if processes else [done.stdout]


def losses(kind: str, releases: Sequence[str], processes: int, flags: str, folder: Path, gpus: bool = True) -> list:
    """Returns the losses that each release's program prints."""
    names = programs(kind, releases)
    words = [user_scripts.__file__, *names, "--", *FLAGS[kind].split(), *flags.split(), "--data-cache-path", "cache"]
    found = losses_in(run(processes, words, folder, gpus), LOSSES[kind])
    return [found[name] for name in names]


LAYOUTS = [(0, ""), (2, "--tensor-model-parallel-size 2"), (2, ""), (2, "--pipeline-model-parallel-size 2")]
"""Processes and flags."""


@pytest.mark.parametrize(("processes", "flags"), LAYOUTS)
@pytest.mark.parametrize("kind", FLAGS)
def test_two_iterations(kind: str, processes: int, flags: str, tmp_path: Path) -> None:
    need_room(processes)
    releases = RELEASES
    if kind == "t5":
        releases = RELEASES[2:6] if "pipeline" in flags else RELEASES[2:]  # earlier ones report another mean
    (expected,) = losses(kind, releases[:1], 0, "", tmp_path, gpus=False)
    # Two iterations, one validation and one test. The validation of the last iteration is not repeated after the loop.
    assert len(expected) == (8 if kind == "bert" else 4)
    for found in losses(kind, releases, processes, flags, tmp_path):
        assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("kind", FLAGS)
def test_two_iterations_in_bfloat16(kind: str, tmp_path: Path) -> None:
    (expected,) = losses(kind, ["0.16"], 0, "", tmp_path, gpus=False)
    for found in losses(kind, RELEASES if kind != "t5" else RELEASES[2:], 0, "--bf16", tmp_path):
        assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_loop(processes: int, tmp_path: Path) -> None:
    need_room(processes)
    names = programs("loop", LOOP_RELEASES)
    for printed in run(processes, [gpus.__file__, user_scripts.__file__, *names, "--"], tmp_path):
        found = losses_in([printed])
        assert printed.count("loaded\n") == len(found) == len(names)
        for losses in found.values():
            assert losses == pytest.approx(found[names[0]], abs=1e-3) and len(losses) == 2
