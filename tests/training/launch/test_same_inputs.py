"""Hosts with other files under the same path are found before the run trains."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import TINY, write_documents

from megatron.core.exceptions import UserError
from megatron.data.preparation.manifest import get_manifest_path
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.data.sources import prefixes_of_run
from megatron.training.launch import same_inputs
from megatron.training.launch.same_inputs import check_same_inputs, digest_of_file, input_differences


def found_by_a_rank(hosts: str, flags: str) -> str:
    """Two hosts of two ranks each: what a rank finds whose files are in its host's folder."""
    host = torch.distributed.get_rank() // 2
    os.chdir(Path(hosts, f"host{host}"))
    same_inputs._code_folder = lambda: Path(hosts, f"host{host}", "code")
    config = configure(f"{TINY} --train-iters 1 {flags}".split(), launch_environment=LaunchEnvironment(4, False))
    try:
        check_same_inputs(config, prefixes_of_run)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Two hosts with the same data, tokenizer and code."""
    (tmp_path / "host0" / "code" / "inner").mkdir(parents=True)
    (tmp_path / "host0" / "code" / "inner" / "part.py").write_text("x = 1\n")
    write_documents(tmp_path / "host0" / "data")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "host0" / name).write_text("{}\n")
    shutil.copytree(tmp_path / "host0", tmp_path / "host1")
    return tmp_path


FLAGS = "--data-path data --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"


@pytest.mark.parametrize("changed", [None, "data.bin", "vocab.json", "code/inner/part.py"])
def test_a_file_of_the_same_size_with_another_byte_is_named(hosts: Path, changed: str | None) -> None:
    if changed is not None:
        path = hosts / "host1" / changed
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    told = run_on_ranks(found_by_a_rank, 4, str(hosts), FLAGS)
    assert len(set(told)) == 1
    if changed is None:
        assert told[0] == "nothing"
        return
    name = changed.replace("code", "megatron")
    assert told[0].startswith(f"hosts have different files: {name} is ") and "(rank 0) and " in told[0]
    assert "(rank 2); give all hosts the same files" in told[0] and told[0].count(f"{path.stat().st_size} bytes") == 2


def test_one_host_reads_nothing(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_inputs, "digests_of_inputs", lambda *_: pytest.fail("read"))
    monkeypatch.chdir(hosts / "host0")
    check_same_inputs(configure(f"{TINY} --train-iters 1 {FLAGS}".split()), prefixes_of_run)


def test_a_missing_file_and_many_files_are_told() -> None:
    hosts = [("a (rank 0)", {"x": "1", **{str(n): "1" for n in range(6)}}), ("b (rank 1)", {}), ("c (rank 2)", {})]
    told = input_differences(hosts)
    assert "x is 1 on a (rank 0) and not there on b (rank 1), c (rank 2); 0 is" in told
    assert "; and 3 more files; give all hosts" in told


def test_a_large_file_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(100_000))
    before = digest_of_file(path, whole=1000, blocks=4)
    with open(path, "r+b") as file:
        file.seek(99_999)
        file.write(b"1")
    after = digest_of_file(path, whole=1000, blocks=4)
    assert before != after and after.endswith("(100000 bytes)")
    assert digest_of_file(tmp_path / "no") == "unreadable (No such file or directory)"


def test_the_manifest_of_a_data_set_is_compared(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hosts / "host0")
    manifest = Path(get_manifest_path("data"))
    manifest.write_text("{}")
    config = configure(f"{TINY} --train-iters 1 {FLAGS}".split())
    assert str(manifest) in same_inputs.digests_of_inputs(config, prefixes_of_run)
