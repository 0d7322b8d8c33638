"""megatron/facades/accelerate_plugin.py: the names that Accelerate's plugin imports. tests/clients trains with it."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.facades import global_vars
from megatron.facades.arguments import parse_args, validate_args
from megatron.facades.initialize import initialize_megatron
from megatron.training.arguments import _add_data_args, _add_logging_args, _add_validation_args
from megatron.training.initialize import _initialize_distributed, _set_random_seed, write_args_to_tensorboard
from megatron.training.tokenizer.tokenizer import _vocab_size_with_padding
from megatron.training.training import training_log

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 9 --log-interval 2 "
    "--make-vocab-size-divisible-by 8 --seed 5"
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run that was started as the plugin starts it, with an attribute of its own."""
    monkeypatch.setattr(sys, "argv", ["train.py", *FLAGS.split(), "--tensorboard-dir", str(tmp_path / "board")])
    args = validate_args(parse_args())
    args.of_script = "mine"
    global_vars.set_global_variables(args, build_tokenizer=False)
    _initialize_distributed(None, None, None)
    return tmp_path


def test_the_plugin_drives_the_run(run: Path) -> None:
    args = global_vars.get_args()
    assert args.of_script == "mine" and args.padded_vocab_size == 16 == _vocab_size_with_padding(10, args)
    args.save = run / "kept"  # it names the folder when it saves
    assert global_vars.current_run().config.checkpoint.save == str(run / "kept") and args.save == run / "kept"
    args.bert_binary_head = False
    args.consumed_train_samples += 3
    assert global_vars.current_run().state.consumed_train_samples == 3 and not args.bert_binary_head
    with pytest.raises(UserError, match=r"args.lr = 5: its value 0.01 was used already"):
        args.lr = 5
    _set_random_seed(5)
    with pytest.raises(UserError, match="the run was started with seed 5; pass --seed 6"):
        _set_random_seed(6, False)
    with pytest.raises(UserError, match="takes no arguments here"):
        _initialize_distributed(print, None, None)
    initialize_megatron(parsed_args=validate_args(parse_args()))
    assert not global_vars.drives_plugin()


def test_the_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_args_to_tensorboard()
    totals: dict[str, torch.Tensor] = {}
    for step, loss in enumerate((2.0, 4.0, 5.0), 1):
        skipped = int(step == 3)
        assert (
            training_log({"lm loss": torch.tensor(loss)}, totals, 0.5, step, 1.0, True, skipped, 0.25, None, 0) is False
        )
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(
        "iteration        2/      10 | learning rate: 5.000000E-01 | lm loss: 3.000000E+00 | grad norm"
    )
    assert set(totals) == {"skipped"}
    global_vars.get_tensorboard_writer().close()
    board = EventAccumulator(str(run / "board")).Reload()
    assert [event.value for event in board.Scalars("lm loss")] == [2.0, 4.0, 5.0]
    assert "seed/text_summary" in board.Tags()["tensors"]


def test_flags_are_read_by_parse_args() -> None:
    parser = argparse.ArgumentParser()
    assert _add_data_args(_add_validation_args(parser)) is parser
    names = vars(_add_logging_args(parser).parse_args([]))
    assert "log_throughput" in names and "log_params_norm" not in names and not any(names.values())
