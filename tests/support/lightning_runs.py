"""Runs of Lightning's own Trainer, with its own loops and with MegatronStrategy. Importing Lightning takes seconds, so
a test runs this module in a process of its own: `python -m support.lightning_runs`."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from support.nemo_runs import CALLS, OF_MODULES, gpt, listening, made_up_data, trainer_of
from torch.utils.data import DataLoader

from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm

LENGTHS: dict[str, Any] = {
    "max_steps": 4,
    "val_check_interval": 2,
    "limit_val_batches": 2,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "accelerator": "cpu",
    "logger": False,
}


class Linear(pl.LightningModule):
    """A module for Lightning's own loops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Rows(pl.LightningDataModule):
    """Data for Lightning's own loops."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(8, 4))  # type: ignore[arg-type]

    val_dataloader = train_dataloader


OF_DATA = ("prepare_data", "setup", "teardown")


def calls_of_lightning() -> list[str]:
    """The calls of a fit in Lightning's own loops."""
    calls: list[str] = []
    trainer = pl.Trainer(
        callbacks=listening(calls, "callback", pl.Callback)(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **LENGTHS,
    )
    module = listening(calls, "module", Linear, (*CALLS, *OF_MODULES))()
    trainer.fit(module, datamodule=listening(calls, "data", Rows, OF_DATA)())
    return calls


class Losses(pl.Callback):
    """Keeps the losses of steps, as callbacks of Lightning read them."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append((trainer.global_step, float(trainer.callback_metrics["reduced_train_loss"])))


def fit_with_strategy(trainer: Any, calls: list[str]) -> list[tuple[int, float]]:
    """Fits a GPT; returns the losses of steps."""
    losses = Losses()
    trainer.callbacks += [losses, listening(calls, "callback", pl.Callback)()]
    module = gpt(listening(calls, "module", llm.GPTModel, (*CALLS, *OF_MODULES)))
    sizes = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0}
    trainer.fit(module, datamodule=listening(calls, "data", llm.MockDataModule, OF_DATA)(**sizes))
    return losses.found


def main(folder: Path) -> None:
    """Compares the runs."""
    lightnings, with_lightning, ours = calls_of_lightning(), [], []
    strategy = nl.MegatronStrategy(ckpt_async_save=False)
    plugin = nl.MegatronMixedPrecision("32")
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(strategy=strategy, plugins=plugin, callbacks=[saving], devices=1, **LENGTHS)
    found = fit_with_strategy(trainer, with_lightning)
    assert with_lightning == lightnings, (with_lightning, lightnings)
    assert trainer.global_step == 4 and [step for step, _ in found] == [1, 2, 3, 4]
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    assert fit_with_strategy(trainer_of(4), ours) == found
    assert ours == lightnings, (ours, lightnings)

    again = pl.Trainer(strategy=nl.MegatronStrategy(), **LENGTHS | {"enable_checkpointing": False})
    (metrics,) = again.validate(gpt(), datamodule=made_up_data(), ckpt_path=str(folder))
    assert metrics["val_loss"] == float(trainer.callback_metrics["val_loss"])

    for lightnings_own in (True, False):
        callbacks = [EarlyStopping("val_loss", patience=1, min_delta=100.0), LearningRateMonitor()]
        if lightnings_own:
            del callbacks[1]  # it wants a logger
            short: Any = pl.Trainer(strategy=nl.MegatronStrategy(), callbacks=callbacks, **LENGTHS | {"max_steps": 20})
        else:
            short = trainer_of(20, callbacks=callbacks)
        short.fit(gpt(), datamodule=made_up_data())
        assert short.global_step == 4, short.global_step
    print("all runs agree")


def main_of_rank() -> None:
    """Fits and tests on the ranks that torchrun has started, all tensor parallel; the first prints the losses."""
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = nl.MegatronStrategy(tensor_model_parallel_size=ranks, ckpt_async_save=False)
    lengths = LENGTHS | {"limit_test_batches": 2, "enable_checkpointing": False}
    trainer, module = pl.Trainer(strategy=strategy, devices=ranks, **lengths), gpt()
    trainer.fit(module, datamodule=made_up_data())
    trainer.test(module, datamodule=made_up_data())
    if trainer.is_global_zero:
        print("losses", *(float(trainer.callback_metrics[name]) for name in ("val_loss", "test_loss")))


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) > 1 else main_of_rank()
