"""Files and folders that flags name must exist."""

import errno
import os
import shlex
from pathlib import Path

import pytest
from support.command_lines import SMALL, configured, without
from support.runs import write_documents

from megatron.training.arguments import configure
from megatron.training.config import file_checks
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--pretrained-checkpoint /no/such", ["--pretrained-checkpoint /no/such: no such folder"]),
        ("--pretrained-checkpoint /no/such --load {there}", []),  # the run has checkpoints of its own
        ("--pretrained-checkpoint {there} --load /no/such", []),
        ("--load /no/such", []),
        (
            "--load /no/such --exit-on-missing-checkpoint",
            ["--load /no/such: no such folder, and --exit-on-missing-checkpoint is given"],
        ),
    ],
)
def test_folders_that_must_hold_a_checkpoint(flags: str, problems: list[str], tmp_path: Path) -> None:
    words = [*SMALL.split(), *flags.format(there=tmp_path).split()]
    for looks in (True, False):
        try:
            configure(words, launch_environment=LaunchEnvironment(1, False, looks_at_files=looks))
        except ConfigurationError as error:
            assert looks and error.problems == problems
        else:
            assert not (looks and problems)


def problems_of(words: str, looks: bool = True) -> list[str]:
    try:
        configure(shlex.split(words), launch_environment=LaunchEnvironment(1, False, looks_at_files=looks))
    except ConfigurationError as error:
        return error.problems
    return []


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-cache-path", "--tensorboard-dir", "--load-hf"])
def test_a_path_of_a_shell_variable_that_is_not_set(flag: str) -> None:
    """It would be the working folder."""
    sentence = f'{flag} "" is an empty path, perhaps from a shell variable that is not set; give a path'
    assert problems_of(f"{SMALL} {flag} ''", looks=False) == [sentence]


@pytest.mark.parametrize("field", file_checks.PATHS)
def test_a_name_that_is_too_long_for_any_file_system(tmp_path: Path, field: str) -> None:
    name = f"{tmp_path}/{'n' * 256}"
    flag = spelling_of(field)
    found = problems_of(f"{without('--mock-data') if 'data' in field else SMALL} {flag} {name}")
    assert all("\n" not in problem and len(problem) < 1000 for problem in found)
    if field in ("save", "load", "pretrained_checkpoint", "tensorboard_dir"):
        assert f"{name}: File name too long" in found


def test_an_empty_path_is_told_once() -> None:
    (problem,) = problems_of(f"{without('--mock-data')} --data-stages ''")
    assert problem.startswith('--data-stages "" is an empty path')


def test_a_load_that_would_find_nothing(tmp_path: Path) -> None:
    """Before, a file or one checkpoint's own folder began a new run, because no checkpoint was in it."""
    (tmp_path / "file").touch()
    checkpoint = tmp_path / "iter_0000020"
    checkpoint.mkdir()
    assert problems_of(f"{SMALL} --load {tmp_path}/iter_0000020") == []  # any folder may have this name
    (checkpoint / "manifest.json").touch()
    for flag in ("--save", "--load", "--pretrained-checkpoint"):
        file = f"{flag} {tmp_path}/file is a file; give the folder of the checkpoints"
        assert problems_of(f"{SMALL} {flag} {tmp_path}/file") == [file]
        one = f"{flag} {checkpoint} is one checkpoint; give the folder that it is in: {tmp_path}"
        assert problems_of(f"{SMALL} {flag} {checkpoint}") == [one + " and --ckpt-step 20" * (flag == "--load")]


@pytest.mark.parametrize("flag", ["--tensorboard-dir", "--wandb-save-dir", "--data-cache-path", "--nonfinite-dump-dir"])
def test_a_file_in_place_of_a_folder(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").touch()
    assert problems_of(f"{SMALL} {flag} {tmp_path}/file") == [f"{flag} {tmp_path}/file is a file; give a folder"]
    assert not problems_of(f"{SMALL} {flag} {tmp_path}/file", looks=False)
    assert not problems_of(f"{SMALL} {flag} {tmp_path}/new")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "corpus_text_document.idx").touch()
    (tmp_path / "half.idx").touch()
    words = SMALL.replace("--mock-data", f"--data-path 1 {tmp_path}/corpus 2 {tmp_path}/half").split()
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "/no/vocab", "--merge-file", "/no/merges"]
    with pytest.raises(ConfigurationError) as caught:
        configure(
            words,
            launch_environment=LaunchEnvironment(1, False, looks_at_files=True),
        )
    assert caught.value.problems == [
        "--vocab-file /no/vocab: no such file",
        "--merge-file /no/merges: no such file",
        f"--data-path {tmp_path}/corpus.idx: no such file; there is {tmp_path}/corpus_text_document",
        f"--data-path {tmp_path}/half.bin: no such file, but {tmp_path}/half.idx exists; "
        "tools/preprocess_data.py writes both: copy both, or run it again",
    ]


def test_half_a_data_set_beside_one_with_a_similar_name(tmp_path: Path) -> None:
    for name in ("half.bin", "half2.idx", "half2.bin"):
        (tmp_path / name).touch()
    (problem,) = problems_of(f"{without('--mock-data')} --data-path {tmp_path}/half")
    assert problem.startswith(f"--data-path {tmp_path}/half.idx: no such file, but {tmp_path}/half.bin exists; ")


def test_a_split_without_training_data() -> None:
    problem = "--split 0,90,10 leaves no data for training; give a first share above 0, such as 969,30,1"
    words = f"{without('--mock-data')} --data-path a"
    assert problems_of(f"{words} --split 0,90,10", looks=False) == [problem]
    assert not problems_of(f"{words} --split 1", looks=False)
    assert not problems_of(f"{words} --split 0,90,10 --skip-train", looks=False)
    assert not problems_of(f"{SMALL} --split 0,90,10")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_in_place_of_the_prefix(tmp_path: Path, suffix: str) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").touch()
    path = f"{tmp_path}/corpus{suffix}"
    words = f"{without('--mock-data')} --data-path {path}"
    assert problems_of(words) == [
        f"--data-path {path}.idx: no such file; give the prefix of both files, {tmp_path}/corpus"
    ]


def test_a_text_in_place_of_prepared_data(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    (tmp_path / "corpus.jsonl_text_document.idx").touch()
    words = f"{without('--mock-data')} --data-path {tmp_path}/corpus.jsonl"
    assert problems_of(words) == [
        f"--data-path {tmp_path}/corpus.jsonl is not prepared data; run tools/preprocess_data.py on it and give the "
        "prefix that it writes"
    ]


def test_an_index_that_was_cut_off(tmp_path: Path) -> None:
    """Found before the model is built, which takes minutes if it is large."""
    prefix = write_documents(tmp_path / "data", documents=3)
    words = f"{without('--mock-data')} --data-path {prefix}"
    assert not problems_of(words)
    whole = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(whole[:-1])
    short = f"--data-path {prefix}.idx: too short: {len(whole) - 1} bytes, its header says {len(whole)}; copy it again"
    assert problems_of(words) == [short]
    assert not problems_of(words, looks=False)
    Path(f"{prefix}.idx").write_bytes(b"")
    assert problems_of(words)[0].startswith(f"--data-path {prefix}.idx: not an index of tokens")
    Path(f"{prefix}.idx").chmod(0)
    if not os.access(f"{prefix}.idx", os.R_OK):  # root may read it
        assert problems_of(words) == [f"--data-path {prefix}.idx: Permission denied"]


def test_tokens_that_are_not_as_many_as_the_index_says(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", documents=3)
    words = f"{without('--mock-data')} --data-path {prefix}"
    size = Path(f"{prefix}.bin").stat().st_size
    os.truncate(f"{prefix}.bin", size - 2)
    assert problems_of(words) == [
        f"--data-path {prefix}.bin: {size - 2} bytes, {prefix}.idx says {size}; copy both again"
    ]
    assert not problems_of(words, looks=False)
    assert not problems_of(f"{words.replace(prefix, write_documents(tmp_path / 'none', documents=0))}")


def test_data_that_is_nowhere(tmp_path: Path) -> None:
    assert problems_of(f"{without('--mock-data')} --data-path {tmp_path}/no/data") == [
        f"--data-path {tmp_path}/no/data.idx: no such file; give the prefix of the .bin and .idx files that "
        "tools/preprocess_data.py wrote"
    ]


def test_a_weight_without_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "corpus", documents=3)
    problem = (
        "--data-path 0.5.idx: no such file; give prefixes alone, or a weight before each: WEIGHT PREFIX WEIGHT PREFIX"
    )
    assert problems_of(f"{without('--mock-data')} --data-path 0.5 corpus 0.5") == [problem]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file/runs/a"
    words = f"{SMALL} --save {below}"
    assert problems_of(words) == [f"--save {below}: {tmp_path}/file is a file, not a folder; give another path"]
    assert not problems_of(f"{words} --dry-run") and not problems_of(words, looks=False)
    assert not problems_of(f"{SMALL} --save {tmp_path}/runs/a") and not problems_of(f"{SMALL} --save runs")
    monkeypatch.setattr(file_checks.os, "access", lambda path, mode: Path(path) != tmp_path)
    problem = f"--save {tmp_path}/runs/a: no permission to write in {tmp_path}; give another path"
    assert problems_of(f"{SMALL} --save {tmp_path}/runs/a") == [problem]


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ("--tensorboard-dir {}", "{}"),
        ("--metrics-path {}/m.jsonl", "{}/m.jsonl"),
        ("--wandb-project a --wandb-exp-name b --wandb-save-dir {}", "{}"),
    ],
)
def test_a_log_that_cannot_be_written(tmp_path: Path, flags: str, folder: str) -> None:
    (tmp_path / "file").touch()
    words = f"{SMALL} {flags.format(tmp_path / 'runs')}"
    assert not problems_of(words)
    words = f"{SMALL} {flags.format(tmp_path / 'file/runs')}"
    flag = flags.split()[-2]
    says = f"{flag} {folder.format(tmp_path / 'file/runs')}: {tmp_path}/file is a file, not a folder; give another path"
    assert problems_of(words) == [says]
    assert not problems_of(f"{words} --dry-run") and not problems_of(words, looks=False)


def test_a_folder_in_place_of_the_file_of_metrics(tmp_path: Path) -> None:
    assert problems_of(f"{SMALL} --metrics-path {tmp_path}") == [f"--metrics-path {tmp_path} is a folder; give a file"]


def test_a_folder_that_permissions_allow_and_the_file_system_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /proc and /sys root has the permission to write."""

    def refuse(path: str, mode: int = 0o777) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    words = f"{SMALL} --save {tmp_path}/runs"
    assert problems_of(words) == [] and not any(tmp_path.iterdir())
    monkeypatch.setattr("tempfile._os.mkdir", refuse)
    reason = f"no folder can be made in {tmp_path} (No such file or directory); give another path"
    assert problems_of(words) == [f"--save {tmp_path}/runs: {reason}"]
    assert not problems_of(f"{words} --dry-run") and not problems_of(words, looks=False)


def test_a_step_without_a_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"iter_000000{step}").mkdir()
        (tmp_path / f"iter_000000{step}/manifest.json").touch()
    problem = f"--ckpt-step: {tmp_path} has no checkpoint of iteration 77; it has: 2, 4"
    for folder in (f"--load {tmp_path}", f"--pretrained-checkpoint {tmp_path}"):
        assert problems_of(f"{SMALL} {folder} --ckpt-step 77") == [problem]
        assert not problems_of(f"{SMALL} {folder} --ckpt-step 77", looks=False)
        assert not problems_of(f"{SMALL} {folder} --ckpt-step 4")


def test_checkpoints_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002/common.pt").touch()
    (problem,) = problems_of(f"{SMALL} --load {tmp_path}")
    assert problem.startswith(f"--load: {tmp_path}/iter_0000002 is another program's checkpoint")


def test_a_folder_of_other_files_holds_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "README").touch()
    assert problems_of(f"{SMALL} --load {tmp_path}") == []  # a line of the log says that a new run starts
    words = f"{SMALL} --load {tmp_path} --exit-on-missing-checkpoint"
    problem = f"--load {tmp_path} holds no checkpoint, and --exit-on-missing-checkpoint is given"
    assert problems_of(words) == [problem]
    assert problems_of(f"{words} --ckpt-step 7") == [
        f"--ckpt-step: {tmp_path} has no checkpoint of iteration 7; it has: none"
    ]
    (tmp_path / "iter_0000002").mkdir()
    assert problems_of(words) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--mock-data", "--multiple-validation-sets needs data sets (--valid-data-path)"),
        ("--valid-data-path 1 a 2 b", "--valid-data-path must be without weights, as each set has its own loss"),
        ("--data-path 1 a", "--data-path must be without weights, as each set has its own loss"),
        (
            "--valid-data-path a b c --validation-set-names x y",
            "x y: 2 names for the 3 sets of --valid-data-path a b c",
        ),
        ("--valid-data-path a b c --validation-set-names x y x", "two sets have the same name"),
    ],
)
def test_validation_sets_with_a_loss_each(flags: str, problem: str) -> None:
    base = SMALL.replace("--mock-data", "--multiple-validation-sets")
    assert len(found := problems_of(f"{base} {flags}", looks=False)) == 1 and problem in found[0]
    if "--valid-data-path" in flags:
        assert not problems_of(f"{base} --valid-data-path a b c --validation-set-names x y z", looks=False)


def test_files_that_the_tokenizer_does_not_read_may_be_missing() -> None:
    folder = SMALL.replace("NullTokenizer", "HuggingFaceTokenizer --tokenizer-model /no/model")
    assert problems_of(folder) == [
        "--tokenizer-model /no/model: no such file or folder here; give a path, as nothing is downloaded"
    ]
    assert problems_of(f"{SMALL} --vocab-file /no/such --merge-file /no/such --tokenizer-model /no/such") == []
    words = SMALL.replace("NullTokenizer", "GPT2BPETokenizer").replace("--vocab-size 100", "")
    assert problems_of(f"{words} --vocab-file /no/a --merge-file /no/b --data-args-path /no/c --mock-data") == [
        "--vocab-file /no/a: no such file",
        "--merge-file /no/b: no such file",
    ]


def test_the_file_of_nccl_settings(tmp_path: Path) -> None:
    """--nccl-communicator-config-path is read before the run; gloo ignores it with a line that says so."""
    file = tmp_path / "nccl.yaml"
    flags = f"--nccl-communicator-config-path {file}"
    assert problems_of(f"{SMALL} {flags}") == [f"--nccl-communicator-config-path {file}: No such file or directory"]
    file.write_text("dp: {max_ctas: 8}")
    assert problems_of(f"{SMALL} {flags}") == []
    (note,) = (note for note in configured(flags).notes if "nccl-communicator" in note)
    assert note == "--nccl-communicator-config-path: has no effect with gloo, which has no such settings"
