"""Data sets and tokenizers that do not fit are refused before the model is built."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.runs import TINY, train, write_documents

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.data.data_checks import check_data_of_run
from megatron.training.dry_run.dry_run import dry_run
from megatron.training.providers import Providers
from megatron.training.tokenizer.null import NullTokenizer

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
    assert "warning: " in capsys.readouterr().err  # no manifest says which tokenizer made them


@pytest.mark.parametrize("script", [pretrain_bert, pretrain_t5])
def test_special_tokens_of_the_family_are_missing(script: Any) -> None:
    flags = f"{FLAGS} --mock-data --tokenizer-type NullTokenizer --vocab-size 40 --decoder-seq-length 16"
    providers = Providers(no_model, script.build_datasets, script.build_forward_step)
    with pytest.raises(UserError, match="--tokenizer-type NullTokenizer: has no token"):
        train(flags, providers, base="", defaults=script.DEFAULTS)
    with pytest.raises(UserError, match="--tokenizer-type NullTokenizer: has no token"):
        dry_run(configure(flags.split(), None, script.DEFAULTS), providers)


def test_data_of_a_script_is_not_looked_at() -> None:
    config = configure(FLAGS.split(), args_defaults={"model_family": "bert", "datasets_of_script": True})
    check_data_of_run(config, NullTokenizer(40))
