"""Two runs that part: the first step, the first checkpoint and tensor; what a command line says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import train

from megatron.core.exceptions import UserError
from megatron.diagnosis.layout_check.run_comparison import (
    bisect_checkpoints,
    common_iterations,
    first_metrics_difference,
    open_run,
    rerun_of,
)
from megatron.training.log.jsonl import read_metrics
from megatron.training.state import weight_chunks
from megatron.training.trainer import Trainer

FLAGS = "--mock-data --train-iters 8 --eval-iters 0 --save-interval 2 --optimizer sgd --sgd-momentum 0"
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def nudge(after: int, number: int) -> Callable[[Trainer], None]:
    """Returns a change of a run: one element of a weight grows after a step."""

    def change(run: Trainer) -> None:
        take_step = run.optimizer.step_on_device

        def watched(*arguments: torch.Tensor) -> object:
            update = take_step(*arguments)
            if run.state.iteration + 1 == after:
                chunks = weight_chunks(run.model, run.environment.groups)
                (chunk,) = (chunk for chunk in chunks if chunk.name == WEIGHT)
                chunk.flat[number] += 1.0
            return update

        run.optimizer.step_on_device = watched  # type: ignore[method-assign, assignment]

    return change


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runs")
    train(f"{FLAGS} --save {root / 'a'}")
    train(f"{FLAGS} --save {root / 'b'}", before=nudge(6, 40))  # row 1, column 8: the hidden size is 32
    return root / "a", root / "b"


@pytest.mark.slow
def test_the_first_step_and_the_first_tensor(runs: tuple[Path, Path]) -> None:
    a, b = map(open_run, runs)
    assert a.metrics is not None and b.metrics is not None and [*a.checkpoints] == [2, 4, 6, 8]
    histories = read_metrics(a.metrics), read_metrics(b.metrics)
    assert common_iterations(*histories) == [*range(1, 9)]
    first = first_metrics_difference(*histories, 0.0)
    assert first is not None and (first.iteration, first.key) == (7, "lm loss")
    found = bisect_checkpoints(a, b, 0.0)
    assert found is not None and (found.last_equal, found.iteration) == (4, 6)
    (tensor,) = found.tensors
    assert tensor.name == WEIGHT and tensor.where.startswith("element [1, 8]: ") and tensor.ranks == ([0], [0])
    assert tensor.where.endswith("; 1 of 4096")


def test_equal_runs_and_tolerated_differences(runs: tuple[Path, Path]) -> None:
    a, b = map(open_run, runs)
    assert bisect_checkpoints(a, a, 0.0) is None and a.metrics is not None
    history = read_metrics(a.metrics)
    assert first_metrics_difference(history, history, 0.0) is None
    assert bisect_checkpoints(a, b, 2.0) is None


def test_single_checkpoints_of_any_iteration(runs: tuple[Path, Path]) -> None:
    a, b = open_run(runs[0] / "iter_0000004"), open_run(runs[1] / "iter_0000008")
    found = bisect_checkpoints(a, b, 0.0)
    assert found is not None and found.last_equal is None and len(found.tensors) > 20
    names = [tensor.name for tensor in found.tensors]
    assert names[:2] == ["embedding.position_embeddings.weight", "embedding.word_embeddings.weight"]
    assert names.index("decoder.layers.0.mlp.linear_fc2.weight") < names.index(WEIGHT)


def test_tensors_of_another_shape_or_missing(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    train(f"{FLAGS} --train-iters 2 --ffn-hidden-size 64 --disable-bias-linear --save {tmp_path}")
    found = bisect_checkpoints(open_run(runs[0]), open_run(tmp_path), 0.0)
    assert found is not None
    where = {tensor.name: tensor.where for tensor in found.tensors}
    assert where[WEIGHT] == "has shape [128, 32] in the first run and has shape [64, 32] in the second"
    assert where["decoder.layers.0.mlp.linear_fc1.bias"].endswith("and is missing in the second")


def test_what_is_no_run(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="no such folder or file"):
        open_run(tmp_path / "none")
    with pytest.raises(UserError, match="neither checkpoints nor metrics"):
        open_run(tmp_path)
    (tmp_path / "words.txt").write_text("pretrain_gpt.py # nothing\n")
    with pytest.raises(UserError, match="there is no flag in it"):
        open_run(tmp_path / "words.txt")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"no checkpoint of the same iteration: 2, 4, 6, 8; none"):
        bisect_checkpoints(open_run(runs[0]), open_run(tmp_path / "c"), 0.0)
    with pytest.raises(UserError, match="give a file with the command line"):
        rerun_of(open_run(tmp_path / "c"), None)


def test_the_command_of_a_run(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    again = rerun_of(open_run(runs[0]), 4)
    assert again.words[-4:] == ["--load", str(runs[0]), "--ckpt-step", "4"] and again.world_size == 1
    assert "--save" not in again.words and "--save-interval" not in again.words and "--mock-data" in again.words
    file = tmp_path / "words.txt"
    file.write_text("X=1 torchrun --nnodes 2 --nproc_per_node=4 pretrain_gpt.py \\\n  --lr 1 --save x --fp64\n")
    assert rerun_of(open_run(file), None).world_size == 8
    assert rerun_of(open_run(file), None).words[:3] == ["--lr", "1", "--fp64"]
    file.write_text("torchrun --nproc-per-node gpu pretrain_gpt.py --lr 1")
    with pytest.raises(UserError, match="give the number of processes as a number"):
        rerun_of(open_run(file), None)
