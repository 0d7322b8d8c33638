"""A Trainer with the names of Transformers: the same run as pretrain_gpt.py, and the same losses as Transformers."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.processes import run_on_ranks
from support.runs import train, write_documents

import pretrain_gpt
from megatron.conversion.exporting import export_model
from megatron.core.exceptions import UserError
from megatron.facades.hf_rows import IGNORED, CausalRows
from megatron.facades.hf_trainer import Trainer

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTH = 48, 16


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama())


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Rows of equal length, the last ones padded."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[LENGTH - number // 3 :] = IGNORED
        made.append({"input_ids": tokens, "labels": labels})
    return made


def arguments(folder: Path, **others: Any) -> SimpleNamespace:
    """The names of TrainingArguments that matter here; the others are absent, as in an object of one's own."""
    values = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 3, "save_strategy": "no",
        "weight_decay": 0.0, "train_sampling_strategy": "sequential", "seed": 7, "dataloader_num_workers": 0,
        "average_tokens_across_devices": True,
    }  # fmt: skip
    return SimpleNamespace(**(values | others))


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def of_transformers(loaded: Any, some: list[dict[str, Any]]) -> float:
    """The mean loss over all tokens with a label."""
    with torch.no_grad():
        logits = loaded(torch.stack([row["input_ids"] for row in some])).logits[:, :-1]
    labels = torch.stack([row["labels"] for row in some])[:, 1:]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))


def test_losses_are_those_of_transformers_and_the_saved_folder_is_loaded(tmp_path: Path) -> None:
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=rows(), eval_dataset=rows()[:5])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(of_transformers(model(), rows()[:5]), abs=2e-6)
    done = trainer.train()
    assert done.global_step == 4 and len(losses(trainer)) == 4
    assert done.training_loss == pytest.approx(sum(losses(trainer)) / 4)
    assert losses(trainer)[0] == pytest.approx(of_transformers(model(), rows()[:4]), abs=2e-6)
    trainer.save_model(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(of_transformers(loaded, rows()[:5]), abs=2e-6) and found < 3.9
    verified = export_model(trainer.checkpoints, tmp_path / "verified", pretrain_gpt.build_model, verify=True)
    assert verified.comparison is not None  # equal logits, or an error
    saved, again = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "verified"))
    assert saved.keys() == again.keys() and all(saved[name].equal(again[name]) for name in saved)


def test_steps_are_those_of_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    given = transformers.TrainingArguments(
        str(tmp_path / "theirs"), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", use_cpu=True, train_sampling_strategy="sequential",
        report_to="none", disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=1,
    )  # fmt: skip
    theirs = transformers.Trainer(model(), given, train_dataset=rows(16))
    theirs.train()
    given.output_dir = str(tmp_path / "ours")
    ours = Trainer(model(), given, train_dataset=rows(16))
    ours.train()
    for ours_step, their_step in zip(ours.state.log_history, theirs.state.log_history, strict=False):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert ours_step[name] == pytest.approx(their_step[name], rel=2e-4, abs=2e-5), (name, ours_step, their_step)


def test_files_train_as_pretrain_gpt_does_with_its_flags(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", vocabulary=VOCABULARY - 1)
    trainer = Trainer(llama(), arguments(tmp_path / "out"), train_dataset=data, seq_length=LENGTH)
    trainer.train()
    words = [str(tmp_path / "again") if word == str(trainer.checkpoints) else word for word in trainer.command_line()]
    expected = train(" ".join(words), base="", defaults={"model_family": "gpt"})
    assert losses(trainer) == expected.losses and len(expected.losses) == 4


def on_ranks(folder: str, tensor: int, pipeline: int) -> tuple[list[float], float]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    size = 4 // (2 * (world // (tensor * pipeline)))
    given = arguments(Path(folder), gradient_accumulation_steps=size)
    layout = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    trainer = Trainer(model(), given, train_dataset=rows(), eval_dataset=rows()[:5], **layout)
    trainer.train()
    found = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    return losses(trainer), found


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(2, 1, 2), (2, 2, 4), (1, 1, 2)])
def test_every_layout_gives_the_same_losses(tensor: int, pipeline: int, ranks: int, tmp_path: Path) -> None:
    alone = Trainer(model(), arguments(tmp_path / "alone"), train_dataset=rows(), eval_dataset=rows()[:5])
    alone.train()
    expected = alone.evaluate()["eval_loss"]
    for found, evaluated in run_on_ranks(on_ranks, ranks, str(tmp_path / "ranks"), tensor, pipeline):
        assert found == pytest.approx(losses(alone), abs=1e-5) and evaluated == pytest.approx(expected, abs=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ranks/model")
    assert of_transformers(loaded, rows()[:5]) == pytest.approx(expected, abs=1e-5)


def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    whole = Trainer(model(), arguments(tmp_path / "whole"), train_dataset=rows())
    whole.train()
    first = Trainer(model(), arguments(tmp_path / "two"), train_dataset=rows(), flags=["--exit-interval", "2"])
    first.train()
    second = Trainer(model(), arguments(tmp_path / "two"), train_dataset=rows())
    second.train(resume_from_checkpoint=True)
    assert losses(first) + losses(second) == losses(whole)


@pytest.mark.parametrize(
    ("given", "keywords", "says"),
    [
        ({}, {"compute_metrics": print}, r"Trainer\(compute_metrics=...\): the run has losses"),
        ({}, {"flags": ["--lr", "1"]}, "--lr 1.0 contradicts TrainingArguments: learning_rate"),
        ({"lr_scheduler_type": "polynomial"}, {}, "TrainingArguments: lr_scheduler_type polynomial: there is no such"),
        ({"load_best_model_at_end": True}, {}, "load_best_model_at_end true: the last weights are kept"),
        ({"optim": "adafactor"}, {}, "optim adafactor: adamw_torch and sgd work"),
    ],
)
def test_what_is_not_offered_is_named(given: dict, keywords: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        Trainer(llama(), arguments(tmp_path, **given), train_dataset=rows(), **keywords).train()


def test_a_model_that_no_family_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"XGLMConfig: architectures: .*XGLMForCausalLM"):
        Trainer(transformers.XGLMConfig(), arguments(tmp_path))
    with pytest.raises(TypeError, match="no argument modle"):
        Trainer(llama(), arguments(tmp_path), modle=1)


def test_it_evaluates_without_training_data(tmp_path: Path) -> None:
    given = arguments(tmp_path, max_steps=-1)
    found = Trainer(model(), given, eval_dataset=rows()[:5]).evaluate()["eval_loss"]
    assert found == pytest.approx(of_transformers(model(), rows()[:5]), abs=2e-6)
    with pytest.raises(UserError, match="generator: the data must be map-style"):
        Trainer(llama(), given, train_dataset=(row for row in rows())).train()


def test_epochs_and_shares_become_steps(tmp_path: Path) -> None:
    given = arguments(tmp_path, max_steps=-1, num_train_epochs=2.5, save_strategy="epoch", warmup_steps=0.25)
    words = " ".join(Trainer(llama(), given, train_dataset=rows(12)).command_line())
    assert "--train-iters 8 " in words and "--save-interval 3 " in words and "--lr-warmup-fraction 0.25" in words


def test_labels_are_shifted_and_rows_filled_up() -> None:
    sample = CausalRows([{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0]}], 4, samples=3)
    assert len(sample) == 3
    item = sample[2]  # the only row again
    assert item["tokens"].tolist() == [5, 6, 7, 0] and item["loss_mask"].tolist() == [1, 0, 0, 0]
    assert item["labels"][0] == 6 and item["sample_id"] == 2
    assert sample[None]["loss_mask"].sum() == 0
    for wrong, says in (
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "padded before its end"),
        ({"input_ids": list(range(5))}, "has 5 tokens; at most 4 fit"),
        ({"text": "x"}, "has no input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "differ in length"),
    ):
        with pytest.raises(UserError, match=says):
            CausalRows([wrong], 4)[0]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "the data set has no rows"),
        ({"train": [1]}, "give one data set of it, such as data['train']"),
        ([{"text": "words"}], "item 0 of the data set has no input_ids"),
        ([[1, 2]], "item 0 of the data set has no input_ids"),
        ([{"input_ids": "words"}], "input_ids must be a list of whole numbers"),
        ([{"input_ids": [1.5, 2.0]}], "input_ids must be a list of whole numbers"),
        ([{"input_ids": [[1, 2], [3, 4]]}], "input_ids must be a list of whole numbers"),
    ],
)
def test_data_of_another_form_is_named(data: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        Trainer(llama(), arguments(tmp_path), train_dataset=data).train()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"input_ids": [1, 2, 9]},
            "9 in input_ids is no token id; the model has ids from 0 to 8",
        ),
        ({"input_ids": [1, -2]}, "-2 in input_ids is no token id"),
        ({"input_ids": [1, 2], "labels": [IGNORED, 9]}, "9 in labels is no token id"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "-1 in labels is no token id"),
        ({"input_ids": [1, 2, 3, 4, 5]}, "at most 4 fit: cut it, or give a longer Trainer(seq_length=...)"),
    ],
)
def test_ids_that_the_model_lacks_are_named(row: Any, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        CausalRows([row], 4, vocabulary=9)[0]
    assert CausalRows([{"input_ids": torch.tensor([[1, 8]])}], 4, vocabulary=9)[0]["tokens"].tolist() == [1, 8, 0, 0]


def test_arguments_in_the_wrong_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SimpleNamespace is neither a model or config of transformers nor a folder"):
        Trainer(arguments(tmp_path), llama(), train_dataset=rows())
    with pytest.raises(UserError, match="expected a list of words"):
        Trainer(llama(), arguments(tmp_path), train_dataset=rows(), flags="--lr 3")
    with pytest.raises(UserError, match="expected a tokenizer of transformers"):
        Trainer(llama(), arguments(tmp_path), train_dataset=rows(), processing_class=object())  # type: ignore[arg-type]


def test_a_saved_model_replaces_only_a_model(tmp_path: Path) -> None:
    target = tmp_path / "modell ü"
    target.mkdir()
    for name in ("config.json", "notes.txt", "model-00001-of-00002.safetensors"):
        (target / name).write_text("mine")
    trainer = Trainer(llama(), arguments(tmp_path / "out", max_steps=1, logging_steps=1), train_dataset=rows())
    with pytest.raises(UserError):
        trainer.save_model(target)  # nothing is trained yet
    assert {file.read_text() for file in target.iterdir()} == {"mine"}
    trainer.train()
    trainer.save_model(target)
    assert (target / "notes.txt").read_text() == "mine" and "llama" in (target / "config.json").read_text()
    assert {file.name for file in target.glob("*.safetensors")} == {"model.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == {"out", target.name}
