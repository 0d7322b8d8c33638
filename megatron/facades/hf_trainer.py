"""The Trainer of Transformers over a run of this package: the same names, any layout, and a folder that Transformers
loads.

    # torchrun --nproc_per_node 4 train.py
    trainer = Trainer(model, TrainingArguments("out", max_steps=100), train_dataset=rows,
                      tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    trainer.train()
    trainer.save_model("out/model")

The run is that of pretrain_gpt.py with the flags that model and arguments stand for; `trainer.command_line()` returns
them.
"""

import contextlib
import importlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from torch import nn

from megatron.conversion.config_flags import DescribedModel, describe_config
from megatron.conversion.exporting import export_model
from megatron.conversion.hub_defaults import Json
from megatron.conversion.hub_run import load_hub_weights
from megatron.conversion.model_folder import read_config
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer
from megatron.facades.hf_rows import CausalRows, Rows, ids_of
from megatron.facades.pretrain import gpt_entry_script, pretrain_config
from megatron.training.arguments import configure
from megatron.training.config.command_line import CommandLine
from megatron.training.config.foreign.taking import finish_foreign_files, take_foreign_files
from megatron.training.config.foreign.training_arguments import read_training_arguments
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.hook import Hook, RunOfHook
from megatron.training.inspection.run_description import command_line_of
from megatron.training.launch.launcher_variables import take_ranks_of_launcher
from megatron.training.log.records import LogWriter, Speed, StepRecord, ValidationRecord
from megatron.training.providers import Context, Providers, SampleCounts

CHECKPOINTS, FIRST_WEIGHTS = "checkpoints", "first-weights"
"""Folders in that of the output: checkpoints of the run, and the weights that the given model had."""

Data = Rows | str | Path | None
"""Rows, or the prefix of .bin and .idx files."""


class _Saved(Protocol):
    """A model, a config or a tokenizer of transformers."""

    def save_pretrained(self, folder: Path, /) -> object: ...


class _Config(Protocol):
    """A config of transformers."""

    def to_diff_dict(self) -> dict[str, Json]: ...


_REFUSED = {
    "model_init": "give the model",
    "compute_loss_func": "the loss is the mean over all tokens that have a label",
    "compute_metrics": "the run has losses, not logits; --eval-tasks scores tasks",
    "callbacks": "a hook (docs/extending.md) takes part in a run",
    "optimizers": "TrainingArguments choose the optimizer",
    "optimizer_cls_and_kwargs": "TrainingArguments choose the optimizer",
    "preprocess_logits_for_metrics": "the run has losses, not logits",
    "peft_config": "all weights are trained",
}
"""Arguments of Transformers' Trainer that are refused if they are given."""


class TrainOutput(NamedTuple):
    """What `train` returns, with the names of Transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass
class TrainerState:
    """What has happened so far, with the names of Transformers."""

    global_step: int = 0
    max_steps: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    """An entry for each step (`step`, `loss`, `grad_norm`, `learning_rate`) and for each evaluation (`step`,
    `eval_loss`), the same on every rank."""


class Trainer:
    """Trains, evaluates and saves a model of a family that conversion knows.

    `model` is a config of transformers (its weights are drawn), a model of transformers, or a folder of one. Data are
    map-style data sets (`CausalRows`), or the prefix of .bin and .idx files. `flags` are further words of a command
    line; one that contradicts the arguments is an error. Raises UserError for what is not offered.
    """

    def __init__(
        self,
        model: object,
        args: object,
        data_collator: object = None,
        train_dataset: Data = None,
        eval_dataset: Data = None,
        processing_class: _Saved | None = None,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        seq_length: int | None = None,
        flags: Sequence[str] = (),
        **others: object,
    ) -> None:
        for name, value in others.items():
            if name not in _REFUSED:
                raise TypeError(f"Trainer has no argument {name}")
            if value is not None and value not in ((None, None), []):
                raise UserError(f"Trainer({name}=...): {_REFUSED[name]}")
        if getattr(data_collator, "mlm", False):
            raise UserError("Trainer(data_collator=...): the loss is that of the next token; mlm=False works")
        if processing_class is not None and not hasattr(processing_class, "save_pretrained"):
            raise UserError("Trainer(processing_class=...): expected a tokenizer of transformers")
        if isinstance(flags, str):
            raise UserError(f"Trainer(flags=...): expected a list of words, such as {flags.split()}")
        self.model, self.args, self.processing_class = model, args, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.output_dir = Path(str(getattr(args, "output_dir", None) or "trainer_output"))
        self.described = _describe(model)
        self.state = TrainerState()
        self._layout = {"tensor": tensor_model_parallel_size, "pipeline": pipeline_model_parallel_size}
        self._flags, self._seq_length = list(flags), seq_length
        take_ranks_of_launcher()

    # The flags -------------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.output_dir / CHECKPOINTS

    def command_line(self) -> list[str]:
        """Returns the flags of the run that `train` starts."""
        return command_line_of(self._config(["--save", str(self.checkpoints)]))

    def _config(self, words: Sequence[str]) -> PretrainConfig:
        """Returns the settings of a run. Raises UserError with all mistakes, one line each."""
        size = {name: ["--" + name + "-model-parallel-size", str(ranks)] for name, ranks in self._layout.items()}
        length = str(self._length())
        argv = [
            *self.described.flags,
            *([] if any("tokenizer-type" in word for word in self._flags) else self._ids()),
            *("--seq-length", length, *([] if self.described.max_length else ["--max-position-embeddings", length])),
            *size["tensor"],
            *size["pipeline"],
            *self._data_words(),
            *words,
            *self._flags,
        ]
        defaults = {"model_family": self.described.model_family, "datasets_of_script": not self._reads_files()}
        return configure(argv, args_defaults=defaults, take_flags=self._take_arguments)

    def _take_arguments(self, line: CommandLine) -> None:
        others = line.values["tensor_model_parallel_size"] * line.values["pipeline_model_parallel_size"]
        ranks = max(1, int(os.environ.get("WORLD_SIZE", "1")) // (others * line.values["context_parallel_size"]))
        rows = _rows(self.train_dataset)
        samples = len(rows) if rows is not None else None if self._reads_files() else 1  # nothing to train on
        if self.train_dataset is None:
            samples = 1
        reading = read_training_arguments(self.args, samples, ranks)
        # Files have an order of their own; sizes of an evaluation need one.
        left = {"dataloader_type"} if self._reads_files() else set()
        left |= {"eval_micro_batch_size", "eval_interval", "start_eval_at_iter"} if self.eval_dataset is None else set()
        reading.settings = [one for one in reading.settings if one.field not in left]
        if self.eval_dataset is not None:
            size = getattr(self.args, "per_device_eval_batch_size", 8) * ranks
            reading.take("per_device_eval_batch_size", "eval_global_batch_size", size)
        line.problems += reading.problems
        line.warnings += reading.lines()
        take_foreign_files(line, [reading])
        finish_foreign_files(line, [reading])

    def _ids(self) -> list[str]:
        """Returns the flags of a tokenizer whose text is ids, as many as the model has rows."""
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(self.described.vocab_size - 1)]

    def _reads_files(self) -> bool:
        return isinstance(self.train_dataset, str | Path)

    def _data_words(self) -> list[str]:
        if self._reads_files():
            evaluation = [] if self.eval_dataset is None else ["--valid-data-path", str(self.eval_dataset)]
            split = [] if evaluation else ["--split", "1,0,0"]
            data = ["--train-data-path" if evaluation else "--data-path", str(self.train_dataset)]
            return [*data, *evaluation, *split, *([] if evaluation else ["--eval-iters", "0"])]
        return ["--eval-iters", "0"] if self.eval_dataset is None else ["--eval-iters", "1", "--full-validation"]

    def _length(self) -> int:
        """Returns the tokens of a sample: those of the first row, unless the argument says so."""
        if self._seq_length is not None:
            return self._seq_length
        for rows in (_rows(self.train_dataset), _rows(self.eval_dataset)):
            if rows is not None:
                return len(ids_of(rows[0], 0))
        if self.described.max_length is None:
            raise UserError("Trainer(seq_length=...) is missing: the model and the data have no length")
        return self.described.max_length

    # The runs --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains to the last step and saves a checkpoint. Continues from the newest one of the output, or of another
        folder, if `resume_from_checkpoint` says so."""
        if self.train_dataset is None:
            raise UserError("Trainer(train_dataset=...) is missing: the data to train on")
        source = resume_from_checkpoint or getattr(self.args, "resume_from_checkpoint", None)
        words = ["--save", str(self.checkpoints)]
        if source:
            words += ["--load", str(self.checkpoints if source is True else source), "--exit-on-missing-checkpoint"]
        config = self._config(words)
        started = time.monotonic()
        seen = self._run(config)
        losses = [row["loss"] for row in seen.rows if "loss" in row]
        self.state.global_step = self.state.max_steps = config.training.train_iters
        self.state.log_history += seen.rows
        mean = math.fsum(losses) / len(losses) if losses else math.nan
        return TrainOutput(
            config.training.train_iters, mean, {"train_loss": mean, "train_runtime": time.monotonic() - started}
        )

    def evaluate(self, eval_dataset: Data = None) -> dict[str, float]:
        """Returns `eval_loss`, the mean over all tokens with a label, of the newest weights: those of the last
        checkpoint of the output, or of the given model before `train`."""
        before = self.eval_dataset
        self.eval_dataset = before if eval_dataset is None else eval_dataset
        try:
            if self.eval_dataset is None:
                raise UserError("Trainer(eval_dataset=...) is missing: the data to evaluate")
            words = ["--skip-train"]
            if self.state.global_step or getattr(self.args, "resume_from_checkpoint", None):
                words += ["--load", str(self.checkpoints), "--exit-on-missing-checkpoint", "--no-load-optim"]
            seen = self._run(self._config(words))
        finally:
            self.eval_dataset = before
        self.state.log_history += seen.rows
        return {name: value for name, value in seen.rows[-1].items() if name != "step"}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the newest checkpoint as a folder that transformers loads, with the tokenizer's files; by default
        `model` in the output. The first rank writes; an earlier model in that folder is
        replaced, once the new one is whole, and other files stay."""
        target = Path(output_dir) if output_dir is not None else self.output_dir / "model"
        if os.environ.get("RANK", "0") != "0":
            return
        if not (target / "config.json").is_file():
            export_model(self.checkpoints, target, None)
        else:
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.absolute().parent) as made:
                export_model(self.checkpoints, Path(made) / "model", None)
                _replace_model(Path(made) / "model", target)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)

    def _run(self, config: PretrainConfig) -> "_Recorder":
        seen = _Recorder()
        entry = gpt_entry_script()
        datasets = entry.build_datasets if self._reads_files() else self._datasets
        providers = Providers(
            entry.build_model,
            datasets,
            entry.build_forward_step,
            build_hooks=lambda context: [seen],
            load_first_weights=None if _is_config(self.model) else partial(_load_model, self.model, self.output_dir),
        )
        decision = pretrain_config(config, providers, time.monotonic())
        if decision is not None and decision.exit_code:
            raise UserError(decision.message)
        return seen

    def _datasets(self, context: Context, counts: SampleCounts) -> list[object]:
        length, cyclic = context.config.data.seq_length, context.config.data.dataloader_type == "cyclic"
        vocabulary = self.described.vocab_size
        train, valid = _rows(self.train_dataset), _rows(self.eval_dataset)
        return [
            None
            if train is None
            else CausalRows(train, length, None if cyclic else max(counts.train, len(train)), vocabulary),
            None if valid is None else CausalRows(valid, length, None, vocabulary),
            None,
        ]


class _Recorder(Hook, LogWriter):
    """Keeps losses of steps and evaluations, and hands them to every rank when the run ends."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def attach(self, run: RunOfHook) -> None:
        """Writes with the log of the run."""
        super().attach(run)
        run.log.writers = (*run.log.writers, self)

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Keeps the steps."""
        for step in steps:
            values = {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate, **_named(step.losses)}
            given = {name: value for name, value in values.items() if value is not None}
            self.rows.append({"step": float(step.iteration), **given})

    def validation(self, record: ValidationRecord) -> None:
        """Keeps the losses of an evaluation."""
        losses = {f"eval_{name}": value for name, value in _named(record.losses).items()}
        self.rows.append({"step": float(record.iteration), **losses})

    def on_exit(self, iteration: int) -> None:
        """Gives every rank the rows of the rank that logs."""
        self.run.log.flush()
        self.rows = max(RankCoordinator().gather(self.rows), key=len)  # type: ignore[arg-type, assignment]


def _rows(data: Data) -> Rows | None:
    """Returns the rows of a data set; None for files and without data. Raises UserError for a stream."""
    if data is None or isinstance(data, str | Path):
        return None
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UserError(f"{type(data).__name__}: the data must be map-style, with a length, or .bin and .idx files")
    if isinstance(data, Mapping):
        raise UserError(f"{type(data).__name__}: give one data set of it, such as data[{next(iter(data), 'train')!r}]")
    if len(data) == 0:
        raise UserError("Trainer: the data set has no rows")
    return data


def _replace_model(made: Path, target: Path) -> None:
    """Moves the files of a model into a folder, over those of an earlier model."""
    new = {file.name for file in made.iterdir()}
    for name in new:
        os.replace(made / name, target / name)
    for old in {*target.glob("model*.safetensors"), *target.glob("model.safetensors.index.json")}:
        if old.name not in new:
            old.unlink()


def _named(losses: Mapping[str, float]) -> dict[str, float]:
    return {"loss" if name == "lm loss" else name.replace(" ", "_"): value for name, value in losses.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The model


def _is_config(model: object) -> bool:
    return not isinstance(model, nn.Module | str | Path)


def _describe(model: object) -> DescribedModel:
    """Returns the flags of a config, of a model, or of a folder of one."""
    if isinstance(model, str | Path):
        return describe_config(read_config(Path(model)), str(model))
    config = model if _is_config(model) else getattr(model, "config", model)
    if not hasattr(config, "to_diff_dict"):
        raise UserError(
            f"Trainer(model=...): {type(model).__name__} is neither a model or config of transformers nor a folder"
        )
    keys = dict(cast(_Config, config).to_diff_dict())  # as config.json has them
    if not _is_config(model):
        keys["architectures"] = [type(model).__name__]
    elif not keys.get("architectures"):
        keys["architectures"] = [_class_of(config)]
    return describe_config(keys, type(config).__name__)


def _class_of(config: object) -> str:
    """Returns the name of the causal language model that transformers makes from a config."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"Trainer needs the package transformers: pip install transformers; {error}") from None
    known = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise UserError(f"{type(config).__name__}: transformers has no causal language model of this config")
    return str(known[type(config)].__name__)


def _load_model(
    model: object, output_dir: Path, context: Context, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer
) -> None:
    """Fills the weights of a run with those of a model of transformers, which the first rank writes to a folder that
    all ranks read."""
    if isinstance(model, str | Path):
        return load_hub_weights(context, chunks, optimizer, str(model))
    folder = output_dir / FIRST_WEIGHTS

    def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        cast(_Saved, model).save_pretrained(folder)

    RankCoordinator().run_on_first(write)
    load_hub_weights(context, chunks, optimizer, str(folder))
