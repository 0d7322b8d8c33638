"""Starts a run from Lightning's own Trainer: its strategy's launcher runs everything instead of Lightning's loops."""

import inspect
from collections.abc import Callable

from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.stage import Request, run_stage

_STAGES = {"_fit_impl": "fit", "_validate_impl": "validate", "_test_impl": "test"}


class RunLauncher:
    """The launcher of a `MegatronStrategy`, as Lightning's Trainer calls it."""

    is_interactive_compatible = True

    def launch(self, function: Callable[..., object], *args: object, trainer: Foreign, **kwargs: object) -> object:
        """Runs the stage that Lightning would run by calling `function`. Returns what Trainer.fit, validate or test
        return."""
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        stage = _STAGES.get(function.__name__, function.__name__.strip("_").removesuffix("_impl"))
        loaders = {
            "train": given.get("train_dataloaders"),
            "valid": given.get("val_dataloaders") or (given.get("dataloaders") if stage == "validate" else None),
            "test": given.get("dataloaders") if stage == "test" else None,
        }
        return run_stage(trainer, Request(stage, given["model"], given.get("datamodule"), loaders, given["ckpt_path"]))

    def kill(self, signum: object) -> None:
        """Does nothing: Lightning calls it to end processes that it has started."""
