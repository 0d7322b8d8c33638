"""Whole runs of nl.Trainer: the same numbers as pretrain_gpt.py, in every layout."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nemo_runs import FLAGS, gpt, made_up_data, trainer_of
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, differences, remembered, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel as CoreGPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades import parallel_state
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm
from megatron.facades.nemo.lightning.bases import Callback


def fitted(steps: int = 3, ckpt_path: str | None = None, **how: Any) -> Outcome:
    outcome, trainer = Outcome(), trainer_of(steps, **how)
    with remembered(outcome, lambda run: None):
        trainer.fit(gpt(), datamodule=made_up_data(), ckpt_path=ckpt_path)
    last = float(trainer.callback_metrics["reduced_train_loss"])  # on every rank
    assert not known(outcome) or last == pytest.approx(known(outcome)[-1], rel=1e-6)
    return outcome


def test_a_run_is_that_of_pretrain_gpt_to_the_bit() -> None:
    ours, theirs = fitted(), train("", GPT, base=FLAGS, defaults={"model_family": "gpt"})
    assert ours.losses == theirs.losses and len(ours.losses) == 3
    assert [each.losses for each in ours.validations] == [each.losses for each in theirs.validations[:-1]]
    assert not differences(ours.at_end, theirs.at_end)


def losses_of_both(layout: str, given: dict[str, int]) -> tuple[list[float], list[float]]:
    """Losses of a fit and of pretrain_gpt.py, where they are known."""
    theirs = train(layout, GPT, base=FLAGS, defaults={"model_family": "gpt"})
    return known(fitted(**given)), known(theirs)


def known(outcome: Outcome) -> list[float]:
    return [loss for step in outcome.steps for loss in step.losses.values()]


@pytest.mark.slow
def test_a_run_of_several_ranks_is_that_of_pretrain_gpt_to_the_bit() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    *_, (ours, theirs) = run_on_ranks(losses_of_both, 4, flags, sizes)
    assert ours == theirs and len(ours) == 3


class CrossEntropy(nl.MegatronLossReduction):
    """A reduction of a user, as NeMo documents it: a mean loss, and one number for the report."""

    def forward(self, batch: Any, forward_out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (forward_out * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return loss, {"avg": loss.detach().reshape(1)}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Any]) -> Tensor:
        return torch.stack([report["avg"] for report in losses_reduced_per_micro_batch]).mean()


class OwnModule(nn.Module):
    """Only a data step, a forward step and loss reductions, with a network of megatron.core."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=4, hidden_size=16, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0
        )
        nl.MegatronOptimizerModule(OptimizerConfig(optimizer="adam", lr=1e-2)).connect(self)

    def configure_model(self, vp_stage: int | None = None) -> None:
        self.module = CoreGPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            vocab_size=51,
            max_sequence_length=16,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )

    def data_step(self, dataloader_iter: Any) -> dict[str, Tensor]:
        batch, _, _ = next(dataloader_iter)
        return llm.get_batch_on_this_context_parallel_rank(dict(batch))

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_reduction(self, model: nn.Module) -> CrossEntropy:
        return CrossEntropy()

    def training_loss_reduction(self) -> CrossEntropy:
        return CrossEntropy()

    def validation_loss_reduction(self) -> nl.MaskedTokenLossReduction:
        return nl.MaskedTokenLossReduction(validation_step=True)


class MaskedModule(OwnModule):
    """With the built-in loss, whose mean is over the tokens of all context parallel ranks."""

    def training_loss_reduction(self) -> nl.MaskedTokenLossReduction:
        return nl.MaskedTokenLossReduction()


class Words(Dataset[dict[str, Tensor]]):
    """Eleven samples, of which the last ones have many masked tokens."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = (torch.arange(17) * (number + 3) + number) % 50
        mask = torch.ones(16)
        mask[: number // 2] = 0.0
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": torch.arange(16)}


class WholeLoss:
    """Computes the mean loss of all unmasked tokens, without batches."""

    value = 0.0

    def on_validation_end(self, trainer: nl.Trainer, module: Any) -> None:
        batch = default_collate([Words()[number] for number in range(11)])
        with torch.no_grad():
            losses = module.module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        self.value = ((losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()).item()


def own_fitted(
    layout: dict[str, int],
    callbacks: Sequence[Any] = (),
    module: type[OwnModule] = OwnModule,
    steps: int = 3,
    ckpt_path: str | None = None,
) -> tuple[list[float], float]:
    """Losses of the steps, where they are known, and the loss of the whole data set after them."""
    outcome, loaders = Outcome(), [DataLoader(Words(), batch_size=1) for _ in range(2)]
    sizes = nl.MegatronDataSampler(seq_len=16, micro_batch_size=1, global_batch_size=2)
    trainer = nl.Trainer(
        strategy=nl.MegatronStrategy(data_sampler=sizes, flags=["--fp64", "--num-workers", "0"], **layout),
        accelerator="cpu",
        max_steps=steps,
        log_every_n_steps=1,
        callbacks=list(callbacks),
    )
    with remembered(outcome, lambda run: None):
        trainer.fit(module(), *loaders, ckpt_path=ckpt_path)
    return known(outcome), float(trainer.callback_metrics["val_loss"])


def test_the_last_batch_of_an_evaluation_counts_exactly() -> None:
    whole = WholeLoss()
    _, loss = own_fitted({}, [whole])
    assert loss == pytest.approx(whole.value, abs=1e-11)


class MeanModule(OwnModule):
    """Whose evaluations report a mean for each micro-batch."""

    def validation_loss_reduction(self) -> Any:
        return CrossEntropy()


class MeanOfSamples:
    """Computes the mean over samples of their mean losses, without batches."""

    value = 0.0

    def on_validation_end(self, trainer: nl.Trainer, module: Any) -> None:
        found = []
        for row in (default_collate([Words()[number]]) for number in range(11)):
            with torch.no_grad():
                losses = module.module(row["tokens"], row["position_ids"], None, labels=row["labels"])
            found.append(((losses * row["loss_mask"]).sum() / row["loss_mask"].sum()).item())
        self.value = sum(found) / 11


def test_a_mean_of_a_user_leaves_out_the_rows_that_fill_up_the_last_batch() -> None:
    whole = MeanOfSamples()
    _, loss = own_fitted({}, [whole], MeanModule)
    assert loss == pytest.approx(whole.value, abs=1e-11)


@pytest.mark.slow
def test_a_mean_of_a_user_is_that_of_all_samples_in_every_layout() -> None:
    _, whole = own_fitted({}, module=MeanModule)
    ranks = run_on_ranks(own_fitted, 4, {"pipeline_model_parallel_size": 2}, (), MeanModule)
    assert [each for _, each in ranks] == pytest.approx([whole] * 4, abs=1e-11)


def test_a_network_whose_vocabulary_only_the_module_knows_goes_on(tmp_path: Path) -> None:
    folder = str(tmp_path)
    straight, _ = own_fitted({}, [nl.ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=0)])
    assert own_fitted({}, ckpt_path=f"{folder}/iter_0000002")[0] == straight[2:]


@pytest.mark.fast("pipeline")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pipeline_model_parallel_size": 2}, id="pipeline"),
        pytest.param({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, id="both"),
        pytest.param({"context_parallel_size": 2}, id="context"),
        pytest.param({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, id="virtual"),
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="sequence"),
    ],
)
def test_a_module_of_a_user_trains_alike_in_every_layout(layout: dict[str, int]) -> None:
    module = MaskedModule if "context_parallel_size" in layout else OwnModule
    sizes = [size for name, size in layout.items() if name != "virtual_pipeline_model_parallel_size"]
    losses, whole = own_fitted({}, module=module)
    ranks = run_on_ranks(own_fitted, math.prod(sizes), layout, (), module)
    assert ranks[-1][0] == pytest.approx(losses, abs=1e-11) and len(losses) == 3
    assert [each for _, each in ranks] == pytest.approx([whole] * len(ranks), abs=1e-11)


def fitted_in_steps(folder: str, first: dict[str, int], second: dict[str, int]) -> list[float]:
    """Losses of a run that stops after two steps, and goes on in another layout."""
    save = nl.ModelCheckpoint(dirpath=folder, every_n_train_steps=2)
    fitted(2, callbacks=[save], flags=["--fp64", "--lr-decay-iters", "3"], **first)
    both = fitted(3, ckpt_path=folder, flags=["--fp64", "--lr-decay-iters", "3"], **second)
    return known(both)


@pytest.mark.slow
def test_another_layout_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    tensor, pipeline = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    straight = fitted(flags=["--fp64"])
    *_, last = run_on_ranks(fitted_in_steps, 2, str(tmp_path), tensor, pipeline)
    assert last == pytest.approx(straight.losses[2:], abs=1e-11) and len(last) == 1


@pytest.mark.slow
def test_a_later_stage_has_the_weights_of_the_fit() -> None:
    trainer, module = trainer_of(2), gpt()
    trainer.fit(module, datamodule=made_up_data())
    trained = float(trainer.callback_metrics["val_loss"])
    assert trainer.validate(module, datamodule=made_up_data()) == [{"val_loss": trained}] and trainer.global_step == 2
    assert trainer.validate(gpt(), datamodule=made_up_data()) != [{"val_loss": trained}]


@pytest.mark.slow
def test_validate_and_test_evaluate_a_checkpoint(tmp_path: Path) -> None:
    fitted(2, callbacks=[nl.ModelCheckpoint(dirpath=str(tmp_path))])
    trainer = trainer_of(2)
    found = trainer.validate(gpt(), datamodule=made_up_data(), ckpt_path=str(tmp_path / "iter_0000002"))
    again = trainer_of(2).test(gpt(), datamodule=made_up_data(), ckpt_path=str(tmp_path))
    outcome = train(f"--load {tmp_path} --skip-train", GPT, base=FLAGS, defaults={"model_family": "gpt"})
    valid, test = (record.losses["lm loss"] for record in outcome.validations)
    assert found == [{"val_loss": valid}] and again == [{"test_loss": test}] and trainer.global_step == 2


def test_a_class_in_place_of_a_callback_is_refused() -> None:
    with pytest.raises(UserError, match=r"callbacks=\[Callback\]: a class; give an object, Callback\(...\)"):
        trainer_of(2, callbacks=[Callback]).fit(gpt(), datamodule=made_up_data())


def test_all_mistakes_are_in_one_error() -> None:
    strategy = nl.MegatronStrategy(moe_extended_tp=True, checkpoint_io=object(), bucket_cap_mb=25, ddp="pytorch")
    trainer = nl.Trainer(strategy=strategy, accelerator="tpu", devices=3, precision="64", limit_val_batches=0.5)
    with pytest.raises(UserError) as error:
        trainer.fit(nn.Linear(2, 2))
    problems = str(error.value).splitlines()
    for word in (
        "MegatronStrategy(moe_extended_tp=True)",
        "MegatronStrategy(checkpoint_io=<object>)",
        "MegatronStrategy(bucket_cap_mb=...)",
        "MegatronStrategy(ddp='pytorch')",
        'accelerator="tpu"',
        "devices=3, num_nodes=1",
        "precision='64'",
        "limit_val_batches=0.5",
        "max_steps=-1",
        "fit: no data",
        "Linear.config is None",
        "Linear has no optimizer",
        "--num-layers is missing",
    ):
        assert [problem for problem in problems if problem.startswith(word)], word
