"""The evaluation tasks of a run, ready to be scored by its model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.data.evaluation.requests import PreparedTask, prepare_task
from megatron.data.evaluation.task_file import read_tasks
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.evaluation.predictor import Predictor
from megatron.training.evaluation.scoring import TaskScores, score_task


@dataclass(frozen=True)
class EvaluationTasks:
    """Tasks, the model that answers them, and its tokenizer."""

    prepared: Sequence[PreparedTask]
    predictor: Predictor
    tokenizer: Tokenizer

    def scores(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[TaskScores]:
        """Yields the scores of each task, the same on every rank, until `should_stop` returns True, which it must do on
        all ranks. Collective."""
        ends = [end for end in (self.tokenizer.eod, self.tokenizer.eos) if end is not None]
        for number, prepared in enumerate(self.prepared):
            if number and should_stop():
                return
            yield score_task(prepared, self.predictor, self.tokenizer, ends)


def prepare_tasks(path: str | None, tokenizer: Tokenizer, max_length: int) -> list[PreparedTask]:
    """Returns the tasks of --eval-tasks with the token rows of their documents; none without the flag. Raises UserError
    as `read_tasks` and `prepare_task` do."""
    if path is None:
        return []
    try:
        return [prepare_task(task, tokenizer, max_length) for task in read_tasks(path)]
    except UserError as error:
        raise UserError(f"--eval-tasks: {error}") from error
