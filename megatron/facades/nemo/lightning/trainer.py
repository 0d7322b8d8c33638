"""`Trainer`: fit, validate and test under Lightning's names, for programs with and without Lightning."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, Foreign
from megatron.facades.nemo.lightning.ranks import RankFacts
from megatron.facades.nemo.lightning.stage import Request, run_stage

ARGUMENTS: Sequence[Argument] = (
    Argument("accelerator", "auto"),
    Argument("strategy", None),
    Argument("devices", "auto"),
    Argument("num_nodes", 1),
    Argument("precision"),
    Argument("logger"),
    Argument("callbacks"),
    Argument("fast_dev_run", False),
    Argument("max_epochs"),
    Argument("min_epochs", note="a run ends after max_steps"),
    Argument("max_steps", -1),
    Argument("min_steps", note="a run ends after max_steps, or when a callback sets trainer.should_stop"),
    Argument("max_time"),
    Argument("limit_train_batches"),
    Argument("limit_val_batches"),
    Argument("limit_test_batches"),
    Argument("limit_predict_batches"),
    Argument("overfit_batches", 0.0),
    Argument("val_check_interval"),
    Argument("check_val_every_n_epoch", 1, note="val_check_interval counts steps"),
    Argument("num_sanity_val_steps"),
    Argument("log_every_n_steps", 50),
    Argument("enable_checkpointing"),
    Argument("enable_progress_bar", note="the run prints a log line every log_every_n_steps steps"),
    Argument("enable_model_summary", note="the run prints the parts that each rank holds"),
    Argument("accumulate_grad_batches", 1),
    Argument("gradient_clip_val"),
    Argument("gradient_clip_algorithm"),
    Argument("deterministic"),
    Argument("benchmark", note="there are no convolutions to choose between"),
    Argument("inference_mode", True, note="evaluations build no graph"),
    Argument("use_distributed_sampler", True, note="the run divides samples over data parallel ranks"),
    Argument("profiler", refusal="leave it out; MegatronStrategy(flags=['--profile', ...]) profiles steps"),
    Argument("detect_anomaly", False, refusal="leave it out; a non-finite step is found and computed again"),
    Argument("barebones", False, note="what it turns off costs nothing here"),
    Argument("plugins"),
    Argument("sync_batchnorm", False, refusal="leave it out; there is no batch norm"),
    Argument("reload_dataloaders_every_n_epochs", 0),
    Argument("default_root_dir"),
    Argument("enable_autolog_hparams", True, note="the log of a run begins with its settings"),
    Argument("model_registry", refusal="leave it out"),
)
"""The arguments of Lightning's Trainer, with its defaults."""


class Trainer(ArgumentValues, RankFacts):
    """Runs a module: `fit`, `validate` and `test`, each a run of this package.

    During a run `global_step`, `callback_metrics` (`reduced_train_loss`, `val_loss`, and what the module logs) and
    `should_stop`, which a callback may set, have Lightning's meaning.
    """

    table = ARGUMENTS
    accelerator: str
    strategy: Foreign
    devices: object
    num_nodes: int
    precision: object
    callbacks: Foreign
    plugins: Foreign
    logger: Foreign
    default_root_dir: Foreign
    enable_checkpointing: bool | None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.callbacks = _listed(self.callbacks)
        self.plugins = _listed(self.plugins)
        self.default_root_dir = self.default_root_dir or str(Path.cwd())
        self.global_step = 0
        self.current_epoch = 0
        self.should_stop = self.sanity_checking = False
        self.state = SimpleNamespace(fn=None)
        """`fn`, which callbacks of Lightning ask for: the stage that runs, such as "fit"."""
        self.callback_metrics: dict[str, Foreign] = {}
        self.logged_metrics: dict[str, Foreign] = {}
        self.lightning_module: Foreign = None
        self.datamodule: Foreign = None
        if self.enable_checkpointing is False:
            self.callbacks = [each for each in self.callbacks if type(each).__name__ != "ModelCheckpoint"]

    @property
    def loggers(self) -> list[Foreign]:
        """The loggers that were given."""
        return [each for each in _listed(self.logger) if not isinstance(each, bool)]

    @property
    def num_devices(self) -> int | None:
        """Processes of each node; None if the launcher decides."""
        if isinstance(self.devices, list | tuple):
            return len(self.devices)
        found = int(str(self.devices)) if str(self.devices).lstrip("-").isdecimal() else None
        return None if found == -1 else found

    @property
    def precision_plugin(self) -> Foreign:
        """The plugin for number formats; None without one."""
        return next((each for each in self.plugins if hasattr(each, "precision")), None)

    @property
    def model(self) -> nn.Module | None:
        """The module that runs."""
        module: nn.Module | None = self.lightning_module
        return module

    @property
    def optimizers(self) -> list[object]:
        """Nothing: the run has the optimizer."""
        return []

    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Foreign = None,
        val_dataloaders: Foreign = None,
        datamodule: Foreign = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Trains a module on the data of a data module, or of loaders. `ckpt_path`: the checkpoint to continue from, a
        folder of checkpoints, or the folder of one."""
        loaders = {"train": train_dataloaders, "valid": val_dataloaders}
        run_stage(self, Request("fit", model, datamodule, loaders, ckpt_path))

    def validate(
        self,
        model: nn.Module,
        dataloaders: Foreign = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: Foreign = None,
    ) -> list[dict[str, float]]:
        """Returns [{"val_loss": mean loss of the validation data}]."""
        return run_stage(self, Request("validate", model, datamodule, {"valid": dataloaders}, ckpt_path)) or []

    def test(
        self,
        model: nn.Module,
        dataloaders: Foreign = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: Foreign = None,
    ) -> list[dict[str, float]]:
        """Returns [{"test_loss": mean loss of the test data}]."""
        return run_stage(self, Request("test", model, datamodule, {"test": dataloaders}, ckpt_path)) or []


def _listed(value: Foreign) -> list[Foreign]:
    if value is None:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]
