"""Where a run's data is, for all kinds of data sets."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_lines import SMALL, configured, problems_of, without
from support.runs import logger_of, train, train_on_ranks, write_documents

from megatron.data.datasets.fim_dataset import GPTFIMDatasetConfig
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.data.batch import Batch
from megatron.training.data.sources import (
    MOST_SOURCES,
    blends,
    gpt_dataset_config,
    gpt_dataset_kind,
    shared_fields,
    source_names,
    with_source_losses,
)
from megatron.training.log.jsonl import read_metrics

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --tokenizer-type NullTokenizer --vocab-size 100"
)
TOKENIZER = NullTokenizer(100)


def write(prefix: Path, *ids: int) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_document(np.array(ids), [len(ids)])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_mock_data_has_no_blend() -> None:
    config = configured("--mock-data", base=BASE)
    assert blends(config) == (None, None)
    made = shared_fields(config, TOKENIZER)
    assert made["mock"] and made["blend"] is None and made["blend_per_split"] is None
    assert made["sequence_length"] == 128 and made["tokenizer"] is TOKENIZER


def test_flags_reach_the_fields(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 1, 2, 100)
    flags = f"--data-path {prefix} --split 8,1,1 --seed 7 --data-cache-path {tmp_path}"
    made = shared_fields(configured(flags, base=BASE), TOKENIZER)
    assert made["blend"] == ([prefix], None) and made["blend_per_split"] is None
    assert (made["split"], made["random_seed"], made["path_to_cache"]) == ("8,1,1", 7, str(tmp_path))


def test_data_of_each_split_replaces_the_split(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "train", 1, 100), write(tmp_path / "valid", 2, 100)
    config = configured(f"--train-data-path {train} --valid-data-path {valid}", base=BASE)
    made = shared_fields(config, TOKENIZER)
    assert made["blend"] is None and made["split"] is None
    assert made["blend_per_split"] == [([train], None), ([valid], None), None]


@pytest.mark.parametrize("field", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_flag_about_documents_reaches_its_field(field: str) -> None:
    tokenizer = NullTokenizer(100)
    made = gpt_dataset_config(configured(f"--{field.replace('_', '-')}"), tokenizer)
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    assert {name: getattr(made, name) for name in names} == {name: name == field for name in names}


def test_the_shared_fields_are_there_and_masks_are_not_made() -> None:
    tokenizer = NullTokenizer(100)
    made = gpt_dataset_config(configured("--seed 9"), tokenizer)
    assert made.mock and made.random_seed == 9 and made.sequence_length == 128 and made.tokenizer is tokenizer
    assert not made.create_attention_mask and made.mmap_bin_files
    assert not gpt_dataset_config(configured("--no-mmap-bin-files"), tokenizer).mmap_bin_files


def test_kinds_of_data_sets() -> None:
    def kind(flags: str, base: str = without("--mock-data")) -> str:
        return gpt_dataset_kind(configured(f"--data-path x {flags}", base=base)).__name__

    assert kind("") == "GPTDataset" and kind("--fim-data") == "GPTFIMDataset"
    sft = without("--mock-data").replace("NullTokenizer", "SFTTokenizer --tokenizer-model x")
    assert kind("--sft", sft) == "SFTDataset"
    for flags in ("", "--sft", "--fim-data"):
        config = configured(flags)
        assert gpt_dataset_kind(config).__name__ == "MockGPTDataset"
        assert bool(flags) == any(note.startswith(f"{flags}: has no effect with --mock-data") for note in config.notes)


def test_the_fields_of_fill_in_the_middle() -> None:
    made = gpt_dataset_config(configured("--fim-data --fim-rate 0.25 --fim-no-prefix x"), NullTokenizer(100))
    assert isinstance(made, GPTFIMDatasetConfig)
    assert (made.fim_rate, made.fim_spm_rate, made.fim_no_prefix) == (0.25, 0.5, "x")
    assert problems_of("--fim-data --fim-rate 2")[0].startswith("--fim-rate 2.0: expected a fraction from 0 to 1")
    assert problems_of("--fim-data --sft") == [
        "--fim-data rearranges plain text and --sft reads conversations; give one"
    ]


def batch_of(sources: list[list[int]], mask: list[list[float]]) -> Batch:
    rows = torch.zeros(len(sources), len(sources[0]), dtype=torch.int64)
    return Batch(rows, rows, torch.tensor(mask), rows, sources=torch.tensor(sources, dtype=torch.int32))


def loss_func(losses: torch.Tensor) -> Any:
    return losses.sum(), losses.numel(), {"lm loss": torch.tensor([losses.sum(), losses.numel()])}


def test_sums_and_tokens_by_source() -> None:
    batch = batch_of([[0, 0], [2, 2]], [[1.0, 0.0], [1.0, 1.0]])
    losses = torch.tensor([[3.0, 50.0], [1.0, 4.0]])
    loss, count, report = with_source_losses(loss_func, batch, ("a", "b", "c"))(losses)
    assert (float(loss), count) == (58.0, 4) and [*report] == ["lm loss", *(f"lm loss on source {n}" for n in "abc")]
    assert [report[f"lm loss on source {name}"].tolist() for name in "abc"] == [[3.0, 1.0], [0.0, 0.0], [5.0, 2.0]]
    losses[1, 0] = math.nan
    report = with_source_losses(loss_func, batch, ("a", "b", "c"))(losses)[-1]
    assert report["lm loss on source a"].tolist() == [3.0, 1.0] and report["lm loss on source c"][0].isnan()


def test_without_a_blend_the_loss_function_is_as_it_was() -> None:
    batch = batch_of([[0]], [[1.0]])
    assert with_source_losses(loss_func, batch, ()) is loss_func
    assert with_source_losses(loss_func, batch, tuple(map(str, range(MOST_SOURCES + 1)))) is loss_func


def test_names_of_sources(tmp_path: Path) -> None:
    for name in ("x/a", "x/b", "y/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_documents(tmp_path / name, documents=3)

    def names(*prefixes: str) -> tuple[str, ...]:
        words = " ".join(f"1 {tmp_path / prefix}" for prefix in prefixes)
        return source_names(configured(f"--data-path {words}", base=without("--mock-data")))

    assert names("x/a", "x/b") == ("a", "b")
    assert names("x/a", "y/a") == (str(tmp_path / "x/a"), str(tmp_path / "y/a"))
    assert names("x/a", "x/b", "x/a") == ("a", "b", "a (2)")  # a prefix may be given again, for more weight
    train(f"--data-path {tmp_path / 'x/a'} {tmp_path / 'x/a'} --split 1,0,0 --train-iters 1 --eval-iters 0")
    assert names("x/a") == () == source_names(configured("", base=SMALL))


@pytest.fixture
def blend(tmp_path: Path) -> str:
    a, b, c = (write_documents(tmp_path / name, documents=100, seed=seed) for seed, name in enumerate("abc"))
    sources = f"--data-path 0 {c} 3 {a} 1 {b}"
    return f"{sources} --train-iters 6 --log-interval 3 --eval-interval 3 --eval-iters 1 --save-interval 3"


def test_metrics_of_a_run_and_of_one_that_is_resumed(
    blend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"{blend} --save {tmp_path / 'run'} --load {tmp_path / 'run'} --exit-interval 3")
    train(f"{blend} --save {tmp_path / 'run'} --load {tmp_path / 'run'}")
    lines = read_metrics(tmp_path / "run/metrics.jsonl").training
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]  # each step once
    keys = [f"lm loss on source {name}" for name in ("a", "b")]
    for line in lines:
        found = [(line[f"tokens on source {name}"], line[f"lm loss on source {name}"]) for name in ("a", "b")]
        assert [count for count, _ in found] == [48, 16]  # 3 and 1 samples of 16 tokens
        assert sum(count * loss for count, loss in found) / 64 == pytest.approx(line["lm loss"], rel=1e-6)
    assert lines[2]["share of samples on source a"] == lines[5]["share of samples on source a"] == 0.75
    assert "share of samples on source a" not in lines[1]
    printed = capsys.readouterr().out
    assert printed.count("data: of the run: a 75.00%, b 25.00%") == 2 and keys[0] not in printed


@pytest.mark.slow
def test_every_layout_has_them(blend: str) -> None:
    flags = f"{blend} --fp64 --hidden-dropout 0 --attention-dropout 0 --reset-attention-mask"
    alone = train(flags).steps
    ranks = logger_of(train_on_ranks(f"{flags} --context-parallel-size 2", 2)).steps
    for one, other in zip(alone, ranks, strict=True):
        assert one.by_source.keys() == other.by_source.keys() == {f"lm loss on source {name}" for name in "ab"}
        for name, (loss, count) in one.by_source.items():
            assert other.by_source[name] == (pytest.approx(loss, rel=1e-9), count)
