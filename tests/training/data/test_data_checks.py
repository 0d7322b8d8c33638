"""Data sets and tokenizers that do not fit are refused before the model is built."""

import io
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console
from support.runs import TINY, train, write_documents

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.core.exceptions import UserError
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.prepare import prepare
from megatron.data.tokenizer.null import NullTokenizer
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.training.arguments import configure
from megatron.training.data.data_checks import check_data_of_run
from megatron.training.providers import Providers

FLAGS = f"{TINY} --train-iters 2 --split 80,10,10"


def no_model(context: Any, stage: Any) -> NoReturn:
    raise AssertionError("the model is built")


def test_every_data_set_is_compared_with_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits = write_documents(tmp_path / "fits", documents=3)
    large = write_documents(tmp_path / "large", documents=3, vocabulary=90)
    flags = f"{FLAGS} --tokenizer-type NullTokenizer --vocab-size 40 --data-path 1 {fits} 1 {large}"
    providers = Providers(no_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step)
    with pytest.raises(UserError, match=r"large\.bin: id \d+ at document 0, offset \d+, but the model has ids 0 to 40"):
        train(flags, providers, base="")
    large = write_documents(tmp_path / "large", documents=3)
    with pytest.raises(AssertionError, match="the model is built"):
        train(flags, providers, base="")
    warning = f"warning: {fits}.manifest.json and 1 more: no manifest, so the tokenizer of these ids is unknown"
    assert capsys.readouterr().err.count(warning) == 1


@pytest.mark.parametrize("script", [pretrain_bert, pretrain_t5])
def test_special_tokens_of_the_family_are_missing(script: Any) -> None:
    flags = f"{FLAGS} --mock-data --tokenizer-type NullTokenizer --vocab-size 40 --decoder-seq-length 16"
    providers = Providers(no_model, script.build_datasets, script.build_forward_step)
    with pytest.raises(UserError, match="--tokenizer-type NullTokenizer: has no token"):
        train(flags, providers, base="", defaults=script.DEFAULTS)
    with pytest.raises(UserError, match="--tokenizer-type NullTokenizer: has no token"):
        dry_run(configure(flags.split(), None, script.DEFAULTS), providers)


@pytest.mark.parametrize(
    ("flags", "defaults"), [("", {"datasets_of_script": True}), ("--mock-data --dataloader-type external", {})]
)
def test_data_of_a_script_is_not_looked_at(flags: str, defaults: dict[str, Any]) -> None:
    config = configure(f"{FLAGS} {flags}".split(), args_defaults={"model_family": "bert", **defaults})
    check_data_of_run(config, NullTokenizer(40))


def test_a_dry_run_compares_manifests_and_reads_no_tokens(tmp_path: Path) -> None:
    """A blend may have thousands of files."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"{n} 7 8"}) + "\n" for n in range(30)))
    sources = PreparationConfig(input=[str(tmp_path / "in.jsonl")], output_prefix=str(tmp_path / "x"), workers=1)
    prepare(sources, NullTokenizer(40), Console(file=io.StringIO()), lambda _: None)
    tokens = tmp_path / "x_text_document.bin"
    tokens.write_bytes(tokens.read_bytes()[::-1])
    flags = f"{FLAGS} --data-path {tmp_path / 'x_text_document'} --tokenizer-type NullTokenizer --vocab-size"
    providers = Providers(pretrain_gpt.build_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step)
    assert dry_run(configure(f"{flags} 40".split()), providers).parameters
    with pytest.raises(UserError, match="its content differs"):
        train(f"{flags} 40", providers, base="")
    with pytest.raises(UserError, match="made with the NullTokenizer of 41 ids, but the model has 31"):
        dry_run(configure(f"{flags} 30".split()), providers)


@pytest.mark.parametrize("flag", ["--data-args-path", "--per-split-data-args-path", "--data-stages", "--data-path"])
def test_a_pipe_in_place_of_a_file_is_named(tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for kind in ("idx", "bin"):
        os.mkfifo(tmp_path / f"pipe.{kind}")
    with pytest.raises(UserError, match=r"pipe(\.idx)?: it is a (FIFO|pipe), not a file"):
        train(f"{flag} {tmp_path / 'pipe'} --train-iters 1", base=TINY.replace("--split 80,10,10", ""))


def test_a_data_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    """Without workers, too: a memory map would end the process by a bus error."""
    prefix = write_documents(tmp_path / "a")
    with pytest.raises(UserError, match=r"sample \d+: .*/a\.bin: was shortened while it was read"):
        train(f"--data-path {prefix} --train-iters 2", before=lambda run: os.truncate(f"{prefix}.bin", 100))
