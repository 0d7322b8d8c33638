"""--data-contract: which clauses a run keeps, and the name of each one that it breaks."""

import dataclasses
import json
from pathlib import Path

import pytest
from support.command_lines import configured

from megatron.core.exceptions import UserError
from megatron.data.preparation.manifest import DataManifest, FileRecord, TokenizerRecord, get_manifest_path
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.data.data_contract import (
    DataContract,
    SourceClause,
    clauses_of,
    keep_data_contract,
    planned_tokenizer,
    read_contract,
)

TOKENIZER = NullTokenizer(99)
CONTRACT = DataContract(
    tokenizer="NullTokenizer",
    tokenizer_family="NullTokenizer",
    tokenizer_ids=100,
    tokenizer_digest=TOKENIZER.digest,
    vocabulary=100,
    deduplication="minhash",
    sources=(SourceClause("web", "data/web_text", 0.75, "aa"), SourceClause("code", "data/code_text", 0.25)),
    sequence_length=128,
    total_tokens=128 * 2 * 10,
)
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --tokenizer-type NullTokenizer --vocab-size 99"
)


def data_set(prefix: Path, deduplication: str | None = "minhash", sha256: str = "aa") -> str:
    prefix.parent.mkdir(exist_ok=True)
    for suffix in ("bin", "idx"):
        prefix.with_name(f"{prefix.name}.{suffix}").touch()
    DataManifest(
        tokenizer=TokenizerRecord.of(TOKENIZER), key="text", level="document", append_eod=True, dtype="uint16",
        documents=1, sequences=1, tokens=1000, documents_with_special_literals=0, special_literals_matched=False,
        lines=1, blank_lines=0, dropped_lines={}, inputs=(), files={"bin": FileRecord(9, sha256)},
        deduplication=deduplication,
    ).write(get_manifest_path(str(prefix)))  # fmt: skip
    return str(prefix)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data_set(tmp_path / "data/web_text")
    data_set(tmp_path / "data/code_text", sha256="bb")
    CONTRACT.write(tmp_path / "contract.json")
    return tmp_path


def config_of(folder: Path, flags: str = "", mix: str = "0.75 {0}/data/web_text 0.25 {0}/data/code_text"):
    # A dry run does not look whether the empty files are data sets.
    base = f"{BASE} --dry-run --data-contract {folder}/contract.json --data-path {mix.format(folder)}"
    return configured(flags, base=base)


def broken(folder: Path, flags: str = "", contract: DataContract = CONTRACT, **more: str) -> dict[str, str]:
    config = config_of(folder, flags, **more)
    return {clause.name: clause.text for clause in clauses_of(contract, config, TOKENIZER) if clause.kept is False}


def test_a_run_keeps_its_contract_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert broken(folder) == {}
    keep_data_contract(config_of(folder), TOKENIZER)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("contract.json:") and all(line.startswith("  kept  ") for line in lines[1:])
    names = [line.split("  kept  ")[1].partition(":")[0] for line in lines[1:]]
    assert names == [
        *("tokenizer", "vocabulary", "sequence length", "total tokens"),
        *("ratio of web", "file of web", "deduplication of web", "ratio of code", "file of code"),
        "deduplication of code",
    ]


@pytest.mark.parametrize(
    ("flags", "clause", "text"),
    [
        ("--seq-length 64 --train-iters 20", "sequence length", "the plan has 128 tokens, the run 64; use 128"),
        ("--train-iters 12", "total tokens", "the plan has 2,560, the run 3,072; use --train-iters 10"),
        ("--global-batch-size 4", "total tokens", "use --train-iters 5"),
    ],
)
def test_lengths_that_differ(folder: Path, flags: str, clause: str, text: str) -> None:
    found = broken(folder, flags)
    assert list(found) == [clause] and text in found[clause]


@pytest.mark.parametrize(
    ("mix", "clause", "text"),
    [
        ("0.5 {0}/data/web_text 0.5 {0}/data/code_text", "ratio of web", "the plan has 0.75, the run 0.5; use 0.75"),
        ("{0}/data/web_text", "source code", "the run does not read data/code_text; add it to --data-path"),
        ("{0}/data/web_text {0}/data/code_text", "data mix", "no weights; give each the plan's ratio"),
        ("3 {0}/data/web_text 1 {0}/data/books_text", "data mix", "books_text is no source of the plan"),
    ],
)
def test_mixes_that_differ(folder: Path, mix: str, clause: str, text: str) -> None:
    found = broken(folder, mix=mix)
    assert text in found[clause]


def test_equal_ratios_in_other_units_and_folders_are_kept(folder: Path) -> None:
    assert broken(folder, mix="3 {0}/data/web_text 1 {0}/data/code_text") == {}


def test_tokenizers_that_differ(folder: Path) -> None:
    other = dataclasses.replace(CONTRACT, tokenizer_digest="00")
    assert "other content" in broken(folder, contract=other)["tokenizer"]
    other = dataclasses.replace(CONTRACT, tokenizer_ids=120, vocabulary=120)
    found = broken(folder, contract=other)
    assert "120 ids, the run's has 100" in found["tokenizer"] and "the run 100; use 120" in found["vocabulary"]
    other = dataclasses.replace(CONTRACT, tokenizer_family="GPT2BPETokenizer")
    assert "the run a NullTokenizer; use the plan's" in broken(folder, contract=other)["tokenizer"]


@pytest.mark.parametrize(
    ("recorded", "planned", "is_kept"),
    [
        ("minhash", "minhash", True), ("both", "minhash", True), ("both", "exact-match", True), 
        ("minhash", "both", False),
        ("exact-match", "minhash", False), (None, "minhash", False), (None, "none", True), ("minhash", "none", False),
        (None, None, True),
    ],
)  # fmt: skip
def test_deduplication(folder: Path, recorded: str | None, planned: str | None, is_kept: bool) -> None:
    data_set(folder / "data/code_text", recorded)
    data_set(folder / "data/web_text", recorded)
    found = broken(folder, contract=dataclasses.replace(CONTRACT, deduplication=planned))
    assert found == {} if is_kept else set(found) == {"deduplication of web", "deduplication of code"}


def test_files_that_differ_from_the_pinned_ones(folder: Path) -> None:
    data_set(folder / "data/web_text", sha256="cc")
    assert broken(folder)["file of web"].startswith("SHA-256 aa... was pinned")
    Path(get_manifest_path(str(folder / "data/web_text"))).unlink()
    assert "no manifest" in broken(folder)["file of web"]


def test_all_broken_clauses_are_told_at_once(folder: Path) -> None:
    config = config_of(folder, "--seq-length 64", "0.5 {0}/data/web_text 0.5 {0}/data/code_text")
    with pytest.raises(UserError) as caught:
        keep_data_contract(config, TOKENIZER)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4 and all("contract.json, clause " in line for line in lines)


def test_a_dry_run_needs_neither_data_nor_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CONTRACT.write(tmp_path / "contract.json")
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model missing --vocab-size 100"
    config = config_of(tmp_path, flags)
    stand_in = planned_tokenizer(config)
    assert stand_in is not None and stand_in.vocab_size == 100
    contract = dataclasses.replace(
        CONTRACT, tokenizer_family="HuggingFaceTokenizer", sources=(SourceClause("web", "web_text", 1.0),)
    )
    config = config_of(tmp_path, flags, "{0}/data/web_text")
    still_open = {clause.name for clause in clauses_of(contract, config, stand_in) if clause.kept is None}
    assert still_open == {"tokenizer", "file of web", "deduplication of web"}
    (tmp_path / "contract.json").unlink()
    keep_data_contract(config, stand_in)
    assert "not here, so no clause is checked" in capsys.readouterr().out


def test_made_up_data_is_not_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_data_contract(configured(f"--data-contract {folder}/contract.json"), TOKENIZER)
    assert "not checked, because --mock-data" in capsys.readouterr().out


def test_a_contract_comes_back(tmp_path: Path) -> None:
    CONTRACT.write(tmp_path / "contract.json")
    assert read_contract(tmp_path / "contract.json") == CONTRACT


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("sources"),
        lambda content: content.update(sources=[]),
        lambda content: content.update(total_tokens="many"),
        lambda content: content.update(colour="red"),
        lambda content: content.update(version=2),
        lambda content: content["sources"][0].pop("ratio"),
        lambda content: content.pop("vocabulary"),
    ],
)
def test_what_is_no_contract_is_refused(tmp_path: Path, change) -> None:
    path = tmp_path / "contract.json"
    CONTRACT.write(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"--data-contract .*contract.json: .*make the plan again"):
        read_contract(path)


def test_planned_world_size() -> None:
    note = "--planned-world-size 4: the run has 2 ranks, and was planned for 4"
    assert note in configured("--planned-world-size 4", ranks=2).notes
    assert not any("planned" in said for said in configured("--planned-world-size 2", ranks=2).notes)
