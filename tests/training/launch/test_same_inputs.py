"""Hosts with other files under the same path are found before the run trains."""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.launch import launch
from support.processes import run_on_ranks
from support.runs import GPT, TINY, write_documents

from megatron.core.exceptions import UserError
from megatron.data.preparation.manifest import get_manifest_path
from megatron.training import pretrain
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.data.sources import prefixes_of_run
from megatron.training.launch import errors, same_inputs
from megatron.training.launch.same_inputs import (
    check_same_flags,
    check_same_inputs,
    differences,
    digest_of_file,
    input_differences,
)


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


def test_each_value_is_told_with_its_ranks() -> None:
    values = [{"--lr": "1.0", "--seed": "1"}, {"--lr": "2.0", "--seed": "1"}, *[{"--lr": "1.0", "--seed": "2"}] * 6]
    assert differences(values, {"--lr", "--seed"}) == [
        "--lr is 1.0 on 7 ranks (0, 2, 3, 4, ...) and 2.0 on rank 1: start every rank with the same flags",
        "--seed is 1 on ranks 0, 1 and 2 on 6 ranks (2, 3, 4, 5, ...): start every rank with the same flags",
    ]
    assert differences([values[0]] * 2, ()) == []
    assert differences(values[:2], {"--seed"}) == [
        "--lr is 1.0 on rank 0 and 2.0 on rank 1: no flag sets it, and hosts with other GPUs or numbers of ranks have "
        "another default; give the flag, or its opposite, to every rank"
    ]


def found_with_flags(flags_of_last: str) -> str:
    rank, world = torch.distributed.get_rank(), 3
    flags = f"{TINY} --global-batch-size 6 --mock-data --train-iters 1 --data-cache-path /rank_{rank} "
    flags += f"--metrics-path /rank_{rank}/metrics.jsonl "
    flags += flags_of_last if rank == world - 1 else "--seed 1"
    try:
        check_same_flags(configure(flags.split(), launch_environment=LaunchEnvironment(world, False)))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("flags_of_last", "found"),
    [
        ("--seed 1", "nothing"),
        ("--seed 2", "--seed is 1 on ranks 0, 1 and 2 on rank 2: start every rank with the same flags"),
    ],
)
def test_every_rank_says_the_same(flags_of_last: str, found: str) -> None:
    assert run_on_ranks(found_with_flags, 3, flags_of_last) == [found] * 3


def found_with_folders(flags: str) -> str:
    """Two hosts whose local disks are in different places. The second one may have no such flag."""
    rank, temporary = torch.distributed.get_rank(), "--non-persistent-save-interval 1 --non-persistent-ckpt-type local"
    path = f"/disk{rank}"
    own = flags.format(path) if rank == 0 or "{}" in flags else ""
    base = f"{TINY} --mock-data --train-iters 1 --bf16 --save x {own}"
    more = f"{temporary} --non-persistent-local-ckpt-dir {path}"
    try:
        check_same_flags(configure(f"{base} {more}".split(), launch_environment=LaunchEnvironment(2, False)))
    except UserError as error:
        return str(error)
    return "nothing"


def test_hosts_may_have_their_local_disks_in_different_places() -> None:
    offload = "--use-distributed-optimizer --optimizer-cpu-offload --optimizer-nvme-offload-path"
    assert run_on_ranks(found_with_folders, 2, f"{offload} {{}}") == ["nothing"] * 2
    told = run_on_ranks(found_with_folders, 2, f"{offload} /disk")[0]
    assert "--optimizer-nvme-offload-path is a folder on rank 0 and None on rank 1: start every rank" in told


def found_with_hosts(flags: str) -> str:
    """Two hosts with GPUs, one of 3 ranks and one of 4, as in an uneven job."""
    rank, layout = torch.distributed.get_rank(), "--tensor-model-parallel-size 2 --sequence-parallel --bf16"
    sizes = "--seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0"
    host = LaunchEnvironment(2, True, ranks_of_host=3 + rank)
    try:
        check_same_flags(
            configure(f"{TINY} --mock-data --train-iters 1 {sizes} {layout} {flags}".split(), launch_environment=host)
        )
    except UserError as error:
        return str(error)
    return "nothing"


def test_a_default_that_differs_between_hosts_is_told_as_such() -> None:
    said = run_on_ranks(found_with_hosts, 2, "")[0]
    assert said.startswith("--tp-comm-overlap is False on rank 0 and True on rank 1: no flag sets it, and hosts with")
    assert run_on_ranks(found_with_hosts, 2, "--no-tp-comm-overlap") == ["nothing"] * 2


def _with_flags_of_rank() -> None:
    if os.environ["RANK"] == "1":
        sys.argv += ["--tensor-model-parallel-size", "2", "--lr", "0.5"]
    with mock.patch.object(errors, "_HEAD_START_OF_FIRST_RANK", 0.1):
        pretrain(GPT)


def test_a_run_ends_before_its_groups_differ(tmp_path: Path) -> None:
    program = launch("--mock-data --train-iters 1 --lr 0.1", 2, tmp_path, _with_flags_of_rank)
    assert program.exit_codes() == [2, 2]
    assert "--lr is 0.1 on rank 0 and 0.5 on rank 1" in program.output(0)
    assert "--tensor-model-parallel-size is 1 on rank 0 and 2 on rank 1" in program.output(0)
