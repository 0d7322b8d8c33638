"""The evaluations of a run: of its splits and tasks, with the weights and with their average."""

from collections.abc import Sequence

from megatron.training.data.splits import ValidationSet
from megatron.training.data.step_data import StepData
from megatron.training.evaluate import EvaluationResult, evaluate, full_pass
from megatron.training.evaluation.tasks import EvaluationTasks
from megatron.training.log.records import TaskRecord, ValidationRecord
from megatron.training.trainer import Trainer

OF_AVERAGE = "-ema"
"""End of the names of splits and tasks that the moving average of the weights was evaluated on (--ema-decay)."""


def evaluate_split(run: Trainer, split: str, *, at_end: bool = False) -> None:
    """Runs --eval-iters global batches of a split (`valid` or `test`) through the model, or with --full-validation
    the whole validation set, and logs the mean loss over their tokens. With --multiple-validation-sets it does so
    for each set; `consumed_valid_samples` counts the samples of one of them, since all advance together. The tasks
    of --eval-tasks follow the validation set. `at_end`: the log names the split in the words for the end of a
    run."""
    data: StepData | None = getattr(run.splits, split)
    data = data if run.config.evaluation.eval_iters else None
    tasks = run.tasks if split == "valid" else None
    if data is None and tasks is None:
        return
    if split == "valid":
        run.last_validated = run.state.iteration
    sets = run.splits.valid_sets if split == "valid" else ()
    sets = sets or (() if data is None else (ValidationSet(lambda: data),))
    with run.log.paused(), run.in_phase("evaluation"):
        run.hooks.before_evaluate(run.state.iteration)
        run.evaluations = {}
        results = _evaluate_model(run, sets, tasks)
        if split == "valid" and results:
            run.state.consumed_valid_samples += results[0].samples
        averaged = []
        if run.optimizer.average is not None and not any(result.interrupted for result in results):
            with run.optimizer.average.in_place_of_weights():
                averaged = _evaluate_model(run, sets, tasks, of=OF_AVERAGE)
        name = {"valid": "validation"}.get(split, split)
        names = [name if each.name is None else f"{name}-{each.name}" for each in sets]
        found = [*zip(names, results, strict=False)]
        found += [(f"{name}{OF_AVERAGE}", result) for name, result in zip(names, averaged, strict=False)]
        run.evaluations |= {name: result.losses for name, result in found if result.losses}
        run.hooks.after_evaluate(run.state.iteration)
        for number, (title, result) in enumerate(found):
            _log_evaluation(run, result, title, at_end, is_named=title != name)
            if number < len(results):
                _process_non_loss_data(run, result)


def _evaluate_model(
    run: Trainer, sets: Sequence[ValidationSet], tasks: EvaluationTasks | None, of: str = ""
) -> list[EvaluationResult]:
    """Evaluates the model as it is on data sets, and scores and logs tasks, whose names get the end `of`. Returns
    the result of each set, the last one perhaps interrupted."""
    results = []
    for each in sets:
        results.append(_evaluate_set(run, each))
        if results[-1].interrupted:
            return results
    if tasks is not None:
        _score_tasks(run, tasks, of)
    return results


def _evaluate_set(run: Trainer, valid_set: ValidationSet) -> EvaluationResult:
    """Runs one evaluation's part of a data set through the model."""
    training, evaluation = run.config.training, run.config.evaluation
    data, iterations = valid_set.open(), evaluation.eval_iters
    if valid_set.num_samples is not None:
        iterations = full_pass(valid_set.num_samples, evaluation.global_batch_size(training))
    data.begin(run.state.iteration)
    result = evaluate(
        run.forward_backward,
        run.forward_step,
        data.iterators(len(run.model)),
        run.model,
        num_iterations=iterations,
        num_microbatches=evaluation.num_microbatches(training, run.environment.groups.size("dp")),
        micro_batch_size=evaluation.micro_batch_size(training),
        seq_length=run.config.data.seq_length,
        decoder_seq_length=run.config.decoder_seq_length,
        device=run.device,
        group=run.environment.groups.dp_cp if run.environment.groups.size("dp_cp") > 1 else None,
        data_parallel_size=run.environment.groups.size("dp"),
        should_stop=lambda: run.exit.poll() is not None,
        non_loss=run.non_loss,
    )
    if valid_set.num_samples is not None:
        data.close()
    if result.interrupted and run.environment.logs:
        print(f"evaluation stopped after {result.iterations} of {iterations} iterations", flush=True)
    return result


def _score_tasks(run: Trainer, tasks: EvaluationTasks, of: str) -> None:
    """Scores the tasks of --eval-tasks and logs each when it is done."""
    for found in tasks.scores(lambda: run.exit.poll() is not None):
        iteration, consumed = run.state.iteration, run.state.consumed_train_samples
        run.evaluations[found.task + of] = {metric: score.value for metric, score in found.scores.items()}
        run.log.task(TaskRecord(iteration, found.task + of, found.pairs, found.documents, consumed))


def _process_non_loss_data(run: Trainer, result: EvaluationResult) -> None:
    """Passes an evaluation's data other than losses to the script's function, with the writer of --tensorboard-dir,
    on the rank that logs. Without that flag it calls nothing, as in Megatron-LM."""
    writer = run.log.tensorboard_writer
    if run.non_loss is None or run.non_loss.process is None or writer is None or result.interrupted:
        return
    run.non_loss.process(result.non_loss_data, run.state.iteration, writer)


def _log_evaluation(run: Trainer, result: EvaluationResult, split: str, at_end: bool, *, is_named: bool) -> None:
    if not result.losses:
        return
    where = f"iteration {run.state.iteration} on {split} set" if at_end else None
    if is_named:
        where = f"iteration {run.state.iteration} on {split}"
    record = ValidationRecord(
        run.state.iteration,
        result.losses,
        split=split,
        where=where,
        consumed_samples=run.state.consumed_train_samples,
        tokens=result.tokens,
        samples=result.samples,
        seconds=result.seconds,
    )
    run.log.validation(record)
