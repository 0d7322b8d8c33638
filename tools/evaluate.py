"""Scores evaluation tasks with a checkpoint or a Hugging Face folder, in one process.

python tools/evaluate.py --load runs/quickstart/checkpoints --eval-tasks tasks.yaml
python tools/evaluate.py --hf-dir exported --eval-tasks tasks.yaml --output scores.json

The file of tasks is that of --eval-tasks of a run, and so are the scores: docs/evaluation.md. A model that needs
several GPUs is scored by its entry script: pretrain_gpt.py --load DIR --skip-train --eval-iters 0 --eval-tasks FILE.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.conversion.hub_predictor import HubPredictor, tokenizer_of_folder
from megatron.conversion.hub_run import load_hub_weights
from megatron.core.declarations.config_fields import flag
from megatron.core.exceptions import UserError
from megatron.core.utils.files import open_atomically
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.config.tool_flags import Section, read_tool_flags
from megatron.training.evaluation.predictor import LayoutPredictor, Predictor
from megatron.training.evaluation.scoring import TaskScores
from megatron.training.evaluation.tasks import EvaluationTasks, prepare_tasks
from megatron.training.log.console_line import format_scores
from megatron.training.trained_model import load_trained_model
from tools.entry_scripts import build_model, words_given_again

USAGE = "python tools/evaluate.py (--load DIR | --hf-dir DIR) --eval-tasks FILE [flags]"
ABOUT = "Scores evaluation tasks with a checkpoint, or with a Hugging Face folder and transformers."


@dataclass(kw_only=True, frozen=True)
class EvaluateConfig:
    """Flags of the tool."""

    load: str | None = None
    """Folder of checkpoints, as in a run's --save. This or --hf-dir is required."""

    ckpt_step: int | None = flag(None, only_with="load")
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    base: str | None = flag(None, only_with="load")
    """Folder of the model that adapters belong to (--lora-rank), if it has moved since the run."""

    hf_dir: str | None = None
    """Folder of a Hugging Face model."""

    eval_tasks: str | None = None
    """YAML or JSON file of tasks. Required."""

    output: str | None = None
    """JSON file to write the scores to."""

    batch_size: int = 16
    """Number of rows that are scored at once. It does not change the scores."""

    max_length: int | None = None
    """Number of tokens that the model reads. Default: that of the model."""

    ema: bool = flag(False, only_with="load")
    """Evaluate the moving average of the weights (--ema-decay of the run)."""

    vocab_file: str | None = flag(None, only_with="load")
    """Vocabulary file, if it has moved since the run."""

    merge_file: str | None = flag(None, only_with="load")
    """File of merges, if it has moved since the run."""

    tokenizer_model: str | None = flag(None, only_with="load")
    """Tokenizer, if it has moved since the run."""

    spec: list[str] | None = flag(None, nargs="*", only_with="load")
    """Module and name of the layers, for a model that was trained with --spec. No code is taken from a checkpoint, so
    give it again."""


def problems_of(config: EvaluateConfig) -> Iterator[str]:
    """Yields a problem for each flag that is missing or impossible."""
    if (config.load is None) == (config.hf_dir is None):
        yield "give one of {load:name} and {hf_dir:name}"
    if config.eval_tasks is None:
        yield "{eval_tasks:name} is required"
    for name in ("batch_size", "max_length"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            yield f"{{{name}}} must be at least 1"
    if config.output is not None and (Path(config.output).is_dir() or not Path(config.output).parent.is_dir()):
        yield "{output} must be a file in a folder that exists"


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    sections = [Section("evaluation", EvaluateConfig, lambda config: list(problems_of(config)))]
    (config,) = read_tool_flags(sys.argv[1:] if argv is None else argv, sections, USAGE, ABOUT)
    evaluate(config)
    return 0


def evaluate(config: EvaluateConfig, title: str | None = None) -> list[TaskScores]:
    """Scores the tasks, prints each when it is done, and writes the file of --output. `title`: default the model's
    name."""
    predictor, tokenizer, name = open_model(config)
    prepared = prepare_tasks(config.eval_tasks, tokenizer, predictor.max_length)
    print(title or name, file=sys.stderr, flush=True)
    found = []
    for scores in EvaluationTasks(prepared, predictor, tokenizer).scores():
        print(f"task {scores.task} | {format_scores(scores.pairs, scores.documents)}", flush=True)
        found.append(scores)
    if config.output is not None:
        write_scores(Path(config.output), name, found)
    return found


def open_model(config: EvaluateConfig) -> tuple[Predictor, Tokenizer, str]:
    """Returns a model, its tokenizer and its name."""
    if config.hf_dir is not None:
        folder = Path(config.hf_dir)
        return HubPredictor(folder, config.batch_size, config.max_length), tokenizer_of_folder(folder), config.hf_dir
    trained = load_trained_model(
        build_model,
        config.load or "",
        config.ckpt_step,
        words_given_again(config),
        average=config.ema,
        base=config.base,
        load_hub=load_hub_weights,
    )
    family = trained.config.model.model_family
    if family in ("bert", "t5"):
        raise UserError(f"--load {config.load}: a {family.upper()} does not predict the next token of a text")
    length = config.max_length or trained.max_sequence_length
    if length > trained.max_sequence_length and trained.config.model.position_embedding_type == "learned_absolute":
        raise UserError(f"--max-length {length}: the model has {trained.max_sequence_length} positions; give no more")
    groups = trained.model.pg_collection
    predictor = LayoutPredictor([trained.model], groups, trained.device, config.batch_size, length)  # type: ignore[arg-type]
    return predictor, trained.tokenizer, f"{config.load}: iteration {trained.iteration}, on {trained.device}"


def write_scores(path: Path, name: str, found: Sequence[TaskScores]) -> None:
    """Writes the scores as JSON. Raises UserError if the file cannot be written."""
    tasks = {
        scores.task: {
            "documents": scores.documents,
            **{metric: {"value": value, "stderr": error} for metric, (value, error) in scores.pairs.items()},
        }
        for scores in found
    }
    try:
        with open_atomically(path) as file:
            file.write(f"{json.dumps({'model': name, 'tasks': tasks}, indent=1)}\n".encode())
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror or error}") from error


if __name__ == "__main__":
    run_main(main)
