"""--use-checkpoint-args: a run whose model is that of a checkpoint, without saying what that is."""

import sys

import pytest
from support.runs import TINY, train

from megatron.core.exceptions import UserError
from megatron.training.arguments import configure, parse_args
from megatron.training.config.checkpoint_args import take_model_flags
from megatron.training.config.command_line import read_command_line
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import architecture_differences, describe_run

MODEL = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --window-size 3,0 "
    "--window-attn-skip-freq [0,1] --num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1] "
    "--moe-router-pre-softmax"
)
RUN = "--micro-batch-size 1 --lr 1e-2 --train-iters 2 --mock-data --eval-iters 0 --num-workers 0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(f"--mock-data --eval-iters 0 --train-iters 1 --save {folder} {MODEL}", base=TINY)
    return folder


def config_of(words, defaults=None):
    words = f"{RUN} --use-checkpoint-args {words}".split()
    return configure(words, None, defaults, launch_environment=LaunchEnvironment(1, False))


def test_the_model_of_the_checkpoint(saved):
    for place in (f"--load {saved}", f"--pretrained-checkpoint {saved} --load {saved}-not-yet"):
        config = config_of(place)
        expected = configure(
            f"{TINY} {MODEL} --mock-data --train-iters 1".split(), launch_environment=LaunchEnvironment(1, False)
        )
        assert not architecture_differences(config, describe_run(expected))
        assert config.transformer.window_attn_skip_freq == [0, 1] and config.transformer.num_moe_experts == 4
        assert config.data.seq_length == 16 and config.tokenizer.vocab_size == 40
        assert config.training.train_iters == 2 and config.training.global_batch_size == 1  # the run's own
        (note,) = [note for note in config.notes if note.startswith("--use-checkpoint-args")]
        assert f"flags from {saved / 'iter_0000001'}: --num-layers --hidden-size" in note


def test_what_the_line_says(saved):
    """The checkpoint replaces flags of the model, and a note says so. Flags of the tokenizer and the layout stay."""
    config = config_of(f"--load {saved} --hidden-size 64 --vocab-size 50 --seq-length 8 --moe-grouped-gemm")
    assert config.transformer.hidden_size == 32
    assert config.tokenizer.vocab_size == 50 and config.data.seq_length == 8 and config.transformer.moe_grouped_gemm
    assert "--use-checkpoint-args replaces --hidden-size 64 with 32" in config.notes


def test_what_only_makes_the_run_faster_is_not_taken():
    """The run may have another layout, which these flags refuse."""
    line = read_command_line([])
    fast = "--moe-balanced-expert-placement --attention-backend fused"
    take_model_flags(line, f"--num-experts 4 --moe-grouped-gemm {fast}".split(), "folder", "--use-checkpoint-args")
    assert line.given == {"num_moe_experts": "--num-experts"} and line.values["num_moe_experts"] == 4


def test_a_run_goes_on_with_it(saved, tmp_path):
    done = train(f"{RUN} --use-checkpoint-args --load {saved} --finetune --train-iters 1", base="")
    assert len(done.losses) == 1


def test_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="--use-checkpoint-args needs a checkpoint: --load or --pretrained-checkpoint"):
        config_of(TINY)
    config = config_of(f"{TINY} --load {tmp_path}")
    assert f"--use-checkpoint-args: no checkpoint in {tmp_path} yet: the given flags are used" in config.notes
    missing = f"--use-checkpoint-args: no checkpoint in {tmp_path}, and the command line does not describe the model"
    with pytest.raises(UserError, match=missing):
        config_of(f"--mock-data --load {tmp_path}")
    with pytest.raises(UserError, match=f"--use-checkpoint-args: {tmp_path} has no checkpoint of iteration 7"):
        config_of(f"{TINY} --load {tmp_path} --ckpt-step 7")


def test_a_script_may_describe_the_model_of_a_first_run(tmp_path, monkeypatch):
    config = config_of(f"{TINY.replace('--hidden-size 32', '')} --load {tmp_path}", {"hidden_size": 48})
    assert config.transformer.hidden_size == 48
    monkeypatch.setattr(sys, "argv", f"script.py --use-checkpoint-args --load {tmp_path}".split())
    assert parse_args().hidden_size is None
