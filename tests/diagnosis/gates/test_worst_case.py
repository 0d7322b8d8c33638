"""The worst case of memory: one document a row, all tokens to the first experts."""

import json
from pathlib import Path

import pytest
import torch
from support.runs import train, write_documents
from torch import nn

from megatron.core.transformer.moe.router import TopKRouter
from megatron.diagnosis.gates.worst_case import longest_rows, route_to_first_experts, with_longest_rows, write_peak
from megatron.training.trainer import Trainer


def test_a_packed_row_becomes_one_document() -> None:
    row = {
        "tokens": torch.arange(6),
        "loss_mask": torch.tensor([1.0, 0, 0, 1, 1, 0]),
        "cu_seqlens": torch.tensor([0, 2, 6, 6, 6, 6, 6], dtype=torch.int32),
        "max_seqlen": torch.tensor(4, dtype=torch.int32),
    }
    longest = longest_rows(row)
    assert longest["cu_seqlens"].tolist() == [0, 6, 6, 6, 6, 6, 6] and int(longest["max_seqlen"]) == 6
    assert longest["loss_mask"].sum() == 6 and row["loss_mask"].sum() == 3
    assert longest["cu_seqlens"].dtype == torch.int32


def test_samples_of_other_kinds_stay() -> None:
    assert longest_rows({"image": 3}) == {"image": 3}


def test_a_dataset_keeps_its_attributes() -> None:
    class Rows:
        name = "mine"

        def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
            return {"tokens": torch.zeros(4), "loss_mask": torch.zeros(4)}

    plain, changed = Rows(), with_longest_rows(Rows())
    assert changed[0]["loss_mask"].sum() == 4 and plain[0]["loss_mask"].sum() == 0
    assert changed.name == "mine" and isinstance(changed, Rows)
    assert with_longest_rows(None) is None


@pytest.mark.parametrize("topk", [1, 2])
def test_all_tokens_go_to_the_first_experts(tmp_path: Path, topk: int) -> None:
    seen: list[torch.Tensor] = []

    def force(run: Trainer) -> None:
        models: list[nn.Module] = list(run.model)
        assert route_to_first_experts(models, torch.device("cpu")) == 2
        for router in (module for model in models for module in model.modules() if isinstance(module, TopKRouter)):
            router.observers.append(lambda router, hidden, logits, experts, weights: seen.append(experts))

    prefix = write_documents(tmp_path / "data")
    train(
        f"--data-path {prefix} --train-iters 1 --num-experts 4 --moe-router-topk {topk} --moe-router-pre-softmax",
        before=force,
    )
    assert seen and all((experts.sort(1)[0] == torch.arange(topk)).all() for experts in seen)


def test_the_peak_of_a_cpu_is_resident_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    write_peak(tmp_path, torch.device("cpu"), 2, routers=1)
    found = json.loads((tmp_path / "peak_00003.json").read_text())
    assert found["device"] == "cpu" and found["steps"] == 2 and 10**7 < found["peak"] < found["total"]
