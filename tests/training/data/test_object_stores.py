"""Runs whose data is in an object store: the same samples as from files, and what the flags must say."""

from pathlib import Path

import fsspec
import pytest
from support.command_lines import problems_of, without
from support.runs import TINY, train, write_documents

from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

NO_DATA = without("--mock-data")
BASE = TINY.replace("--split 80,10,10 ", "")


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    local = write_documents(tmp_path / "corpus")
    store = fsspec.filesystem("memory")
    for suffix in ("bin", "idx"):
        store.pipe_file(f"/runs/corpus.{suffix}", Path(f"{local}.{suffix}").read_bytes())
    return local


def test_the_samples_are_those_of_files(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--train-iters 2 --eval-iters 0 --data-cache-path {tmp_path / 'cache'}"
    files = train(f"{flags} --data-path {prefix}")
    copies = f"--object-storage-cache-path {tmp_path / 'copies'} --num-workers 1"
    remote = train(f"{flags} {copies} --data-path memory://runs/corpus")
    assert remote.losses == files.losses and remote.sample_ids == files.sample_ids
    assert len([*(tmp_path / "copies").iterdir()]) == 1
    assert "memory://runs/corpus.manifest.json: no manifest" in capsys.readouterr().err


def test_ids_are_compared_with_the_vocabulary_when_they_are_read(prefix: str, tmp_path: Path) -> None:
    local = write_documents(tmp_path / "large", vocabulary=90)
    for suffix in ("bin", "idx"):
        fsspec.filesystem("memory").pipe_file(f"/runs/large.{suffix}", Path(f"{local}.{suffix}").read_bytes())
    flags = f"--train-iters 9 --eval-iters 0 --data-cache-path {tmp_path / 'cache'} --data-path memory://runs/large"
    message = r"sample \d+: memory://runs/large.bin: id \d+ at sequence \d+, offset \d+, but the model has ids 0 to 40"
    for workers in ("0", "1"):
        with pytest.raises(UserError, match=message):
            train(f"{flags} --num-workers {workers}")


def test_flags_that_must_fit(prefix: str, tmp_path: Path) -> None:
    (problem,) = problems_of("--data-path memory://runs/corpus", base=NO_DATA)
    assert problem == (
        "--data-path memory://runs/corpus: give --data-cache-path, a local folder for the order of samples"
    )
    words = f"{NO_DATA} --data-path memory://runs/none --data-cache-path x".split()
    with pytest.raises(UserError, match=r"--data-path memory://runs/none.idx: no such object"):
        configure(words, launch_environment=LaunchEnvironment(1, False, looks_at_files=True))
    words_file = tmp_path / "words.txt"
    for content, problem in (
        (
            "memory://runs/corpus",
            "memory://runs/corpus: give --data-cache-path, a local folder for the order of samples",
        ),
        ("memory://runs/none", "memory://runs/none.idx: no such object"),
        (f"1 {prefix} 2 {tmp_path}/none", f"{tmp_path}/none.idx: no such file"),
    ):
        words_file.write_text(content)
        with pytest.raises(UserError) as caught:
            configure(
                f"{NO_DATA} --data-args-path {words_file}".split(),
                launch_environment=LaunchEnvironment(1, False, looks_at_files=True),
            )
        assert f"--data-args-path {words_file}: {problem}" in str(caught.value)
        assert "--data-path" not in str(caught.value)
    found = problems_of("--data-path memory://runs/corpus --data-cache-path x --sft", base=NO_DATA)
    assert any("--sft reads local files; copy them" in problem for problem in found)


def test_keys_in_urls_are_shown_nowhere(prefix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither in output, errors, metrics, index caches nor checkpoints."""
    store, run = fsspec.filesystem("memory"), tmp_path / "run"
    for name in "ab":
        for suffix in ("idx", "bin"):
            content = store.cat_file(f"/runs/corpus.{suffix}")
            store.pipe_file(f"/key:SECRET@runs/{name}.{suffix}", content)
    data = "--data-path 1 memory://key:SECRET@runs/a 1 memory://key:SECRET@runs/b"
    flags = f"{data} --data-cache-path {tmp_path / 'cache'} --save {run} --load {run} --save-interval 2 --eval-iters 0"
    train(f"{flags} --train-iters 2 --print-config --log-interval 1 --split 1", base=BASE)
    train(f"{flags} --train-iters 3 --override-opt-param-scheduler --split 100,1,0", base=BASE)
    with pytest.raises(UserError) as caught:
        train(f"{flags.replace('runs/a', 'runs/none')} --train-iters 4 --split 1", base=BASE)
    shown = capfd.readouterr()
    assert "memory://***@runs/a" in shown.out and "SECRET" not in shown.out + shown.err + str(caught.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert [path for path in files if b"SECRET" in path.read_bytes()] == []
