"""What entry scripts of Megatron-LM's releases 0.5 to 0.16 do works on this package, in one process and in two.

The scripts themselves are not here, and the programs of tests/support/released are none of them: they are written from
facts (tests/data/megatron_lm_script_names.json), which say what a release's script imports, reads and calls. They train
with the losses of our own scripts. tests/gpu/test_scripts_on_gpu.py runs them on GPUs; checkout.py runs the scripts of
a checkout.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from support.launch import launch
from support.released.facts import LOOP_RELEASES, RELEASES
from support.user_scripts import FLAGS, ROOT, losses_in, programs, run_in, run_scripts


def losses_of(
    kind: str, folder: Path, flags: str, ranks: int, names: Sequence[str], loss: str = "lm loss"
) -> dict[str, list[float]]:
    """What scripts and programs print: the losses of two iterations, of the validations and of the test, and the
    gradient norms of the iterations: with Adam, losses do not show that a loss is divided by a wrong number. In one
    process, where each program does everything, it must have used all facts."""
    cached = f"{flags} --data-cache-path {folder}"  # the order of the samples, which all of them share
    program = launch(cached, ranks, folder, partial(run_scripts, names), base=FLAGS[kind])
    codes = program.exit_codes(280.0)
    texts = [program.output(rank) for rank in range(max(ranks, 1))]
    assert set(codes) == {0}, (codes, *texts)
    unused = [line for line in texts[0].splitlines() if line.startswith("unused facts: ")]
    assert len(unused) == sum("@" in name for name in names)
    assert ranks or set(unused) <= {"unused facts: []"}, unused
    return losses_in(texts, f"{loss}|grad norm")


EVERY_LOSS = ["0.5", "0.11", "0.16"]
"""Three releases that have every kind of loss function."""
TENSOR_PARALLEL = "--tensor-model-parallel-size 2"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
GPT_LAYOUTS = {
    "one process": ("", 0, RELEASES),
    "tensor parallel": (TENSOR_PARALLEL, 2, RELEASES),
    "data parallel": ("", 2, EVERY_LOSS),
    "pipeline parallel": ("--pipeline-model-parallel-size 2", 2, EVERY_LOSS),
    "context parallel": ("--context-parallel-size 2", 2, EVERY_LOSS),
}
"""Flags, number of processes (0: plain python), releases."""


@pytest.mark.fast("one process", "pipeline parallel")
@pytest.mark.parametrize("layout", GPT_LAYOUTS)
def test_gpt(layout: str, tmp_path: Path) -> None:
    flags, ranks, releases = GPT_LAYOUTS[layout]
    ours = str(ROOT / "pretrain_gpt.py")
    theirs = programs("gpt", releases)
    found = losses_of("gpt", tmp_path / "run", flags, ranks, [ours, *theirs])
    assert found.keys() == {ours, *theirs} and len(found[ours]) == 6
    for path in theirs:
        expected, tolerance = list(found[ours]), 1e-5
        if layout == "context parallel" and path == theirs[0]:  # multiplies its loss itself, which a line tells
            expected[1], expected[3], tolerance = 2 * expected[1], 2 * expected[3], 0.01  # the gradient norms
        assert found[path] == pytest.approx(expected, abs=tolerance), path


BERT_LAYOUTS = {
    "one process": ("", 0, RELEASES),
    "tensor parallel": (TENSOR_PARALLEL, 2, RELEASES),
    "pipeline parallel": ("--pipeline-model-parallel-size 2", 2, EVERY_LOSS),
}


@pytest.mark.fast("one process")
@pytest.mark.parametrize("layout", BERT_LAYOUTS)
def test_bert(layout: str, tmp_path: Path) -> None:
    flags, ranks, releases = BERT_LAYOUTS[layout]
    ours, names = str(ROOT / "pretrain_bert.py"), programs("bert", releases)
    found = losses_of("bert", tmp_path / "run", flags, ranks, [ours, *names], "(?:lm|sop) loss")
    first = found[names[0]]
    assert found.keys() == {ours, *names} and len(first) == 10
    assert found[ours] == pytest.approx(first, abs=0.05)  # ours reports the mean over tokens, not over micro-batches
    assert [found[ours][place] for place in (2, 5)] == pytest.approx([first[2], first[5]], abs=1e-5)  # gradient norms
    for name in names:
        assert found[name] == pytest.approx(first, abs=1e-5), name


T5_LAYOUTS = {
    "one process": ("", 0, RELEASES),
    "tensor parallel": (TENSOR_PARALLEL, 2, RELEASES),
    "encoder and decoder stages": (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1",
        2,
        ["0.5", "0.8", "0.9", "0.11"],
    ),
    "encoder stages counted apart": ("--encoder-pipeline-model-parallel-size 1", 2, ["0.9", "0.11"]),
}


@pytest.mark.fast("one process")
@pytest.mark.parametrize("layout", T5_LAYOUTS)
def test_t5(layout: str, tmp_path: Path) -> None:
    flags, ranks, releases = T5_LAYOUTS[layout]
    ours = str(ROOT / "pretrain_t5.py")
    paths = programs("t5", releases)
    found = losses_of("t5", tmp_path / "run", flags, ranks, [ours, *paths])
    assert found.keys() == {ours, *paths} and len(found[ours]) == 6
    for path, release in zip(paths, releases, strict=True):
        # Two releases report the mean over micro-batches, with equal weights for any numbers of tokens.
        assert found[path] == pytest.approx(found[ours], abs=0.05 if release in ("0.5", "0.6") else 1e-5), path


@pytest.mark.slow
def test_a_copy_of_one_file(tmp_path: Path) -> None:
    """Two releases have pretrain_gpt.py in three files. A copy of one of them finds ours in place of the others."""
    copies = programs("gpt-with-own-builders", ["0.15", "0.16"])
    flags = f"{VIRTUAL} --num-experts 2 --mtp-num-layers 1"
    theirs = programs("gpt", ["0.16"])
    found = losses_of("gpt", tmp_path / "run", flags, 2, [*theirs, *copies])
    for name in copies:
        assert found[name] == pytest.approx(found[theirs[0]], abs=1e-5) and found[name], name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_virtual_stages(kind: str, tmp_path: Path) -> None:
    """Release 0.14 tells virtual stages apart when it builds the model, and not when it builds the datasets."""
    paths = programs(kind, ["0.14", "0.15", "0.16"])
    found = losses_of(kind, tmp_path / "run", VIRTUAL, 2, paths, "(?:lm|sop) loss")
    for path in paths:
        assert found[path] == pytest.approx(found[paths[0]], abs=1e-5) and found[path], path


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", FLAGS)
def test_each_alone(kind: str, release: str, tmp_path: Path) -> None:
    """Without the programs that ran before it in the tests above, and what they have imported."""
    paths = programs(kind, [release])
    assert len(losses_of(kind, tmp_path / "run", "", 0, paths)[paths[0]]) == 6


def test_the_loop(tmp_path: Path) -> None:
    names, found = programs("loop", LOOP_RELEASES), []
    for ranks in (1, 2):
        program = launch("", ranks, tmp_path / str(ranks), partial(run_in, tmp_path / str(ranks), names))
        assert set(program.exit_codes(100.0)) == {0}, [program.output(rank) for rank in range(ranks)]
        for rank in range(ranks):
            text = program.output(rank)
            assert text.count("loaded\n") == text.count("unused facts: []") == len(names)
            found += losses_in([text]).values()
    assert len(found) == 3 * len(names)
    for losses in found:
        assert losses == pytest.approx(found[0], abs=1e-5) and len(losses) == 2
