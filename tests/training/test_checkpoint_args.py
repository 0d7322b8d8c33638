"""--use-checkpoint-args: a run whose model is that of a checkpoint, without saying what that is."""

import sys

import pytest
from support.runs import TINY, train

from megatron.core.exceptions import UserError
from megatron.training.arguments import configure, parse_args
from megatron.training.checkpoint_args import take_model_flags
from megatron.training.config.command_line import read_command_line
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import architecture_differences, describe_run

MODEL = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --window-size 3,0 "
    "--window-attn-skip-freq [0,1] --num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1] "
    "--moe-router-pre-softmax --hidden-dropout 0.3"
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
    """Given flags of the tokenizer, the lengths and the layout stay, and so does what a run chooses; a line says so."""
    chosen = "--hidden-dropout 0.2 --attention-dropout 0 --moe-aux-loss-coeff 0.5"
    config = config_of(f"--load {saved} --vocab-size 50 --seq-length 8 --moe-grouped-gemm {chosen}")
    assert config.tokenizer.vocab_size == 50 and config.data.seq_length == 8 and config.transformer.moe_grouped_gemm
    assert (config.transformer.hidden_dropout, config.transformer.attention_dropout) == (0.2, 0.0)
    assert config.transformer.moe_aux_loss_coeff == 0.5
    (note,) = [note for note in config.notes if "given flags stay" in note]
    assert f"--hidden-dropout 0.2 (0.3 in {saved / 'iter_0000001'})" in note


def test_what_a_config_file_says_stays_too(saved, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("hidden_dropout: 0.2\n")
    assert config_of(f"--load {saved} --config {file}").transformer.hidden_dropout == 0.2
    file.write_text("hidden_size: 64\n")
    with pytest.raises(UserError, match="--hidden-size is 64 in this run and 32 in"):
        config_of(f"--load {saved} --config {file}")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("--hidden-size 64", "--hidden-size is 64 in this run and 32 in .*iter_0000001; leave --hidden-size out"),
        ("--normalization LayerNorm", "--normalization is LayerNorm in this run and RMSNorm in"),
        ("--window-size 5,0", "--window-size is 5,0 in this run and 3,0 in"),
        ("--norm-epsilon 1e-3", "--norm-epsilon is 0.001 in this run and 1e-05 in the checkpoint; leave the flag out"),
        ("--squared-relu", r"the activation .* is squared_relu in this run and silu in the checkpoint"),
        ("--encoder-num-layers 3", ".* 2 entries for --num-layers 3"),
    ],
)
@pytest.mark.parametrize("how", ["--load {}", "--pretrained-checkpoint {}", "--load {} --finetune"])
def test_a_given_flag_of_another_model_is_an_error(saved, given, problem, how):
    """Whether the checkpoint's command line has the flag or only its default."""
    with pytest.raises(UserError, match=f"--use-checkpoint-args: {problem}|{problem}"):
        config_of(f"{how.format(saved)} {given}")
    config_of(f"{how.format(saved)} --hidden-size 32 --swiglu --window-size 3,0 --norm-epsilon 1e-5")


def taken(words, given=""):
    """The line of a run that gives these flags and takes those of a checkpoint, which are `words`."""
    line = read_command_line(given.split())
    take_model_flags(line, words.split(), "folder", "--use-checkpoint-args")
    return line


def test_what_only_makes_the_run_faster_is_not_taken():
    """The run may have another layout, which these flags refuse."""
    fast = "--attention-backend fused"
    fast += " --encoder-tensor-model-parallel-size 2 --moe-shared-expert-overlap --pipeline-model-parallel-layout Et|tL"
    line = taken(f"--num-experts 4 --moe-grouped-gemm {fast}")
    assert line.given == {"num_moe_experts": "--num-experts"} and line.values["num_moe_experts"] == 4


def test_how_the_other_run_began_is_not_taken():
    line = taken("--num-experts 4 --moe-use-upcycling --moe-upcycling-granularity 2")
    assert line.given == {"num_moe_experts": "--num-experts"}


def test_the_stages_of_a_pattern_are_layout():
    assert taken("--hybrid-layer-pattern MM|M-M*").values["hybrid_layer_pattern"] == "MMM-M*"
    for recorded, given in (("MM|M-M*", "MMM-M*"), ("MMM-M*", "MM|M-M*"), ("M|MM-M*/*-", "MMM-|M*/*-")):
        line = taken(f"--hybrid-layer-pattern {recorded}", f"--hybrid-layer-pattern {given}")
        assert not line.problems and line.values["hybrid_layer_pattern"] == given
    (problem,) = taken("--hybrid-layer-pattern MM|M-M*", "--hybrid-layer-pattern MM|MM").problems
    assert "--hybrid-layer-pattern is MMMM in this run and MMM-M* in folder" in problem


def test_the_lengths_of_encoder_and_decoder_are_taken():
    words = "--encoder-seq-length 32 --decoder-seq-length 16"
    line = taken(words)
    assert (line.values["encoder_seq_length"], line.values["decoder_seq_length"]) == (32, 16)
    line = taken(words, "--seq-length 64 --decoder-seq-length 8")
    assert (line.values["encoder_seq_length"], line.values["decoder_seq_length"]) == (None, 8)


def test_code_is_not_taken():
    line = taken("--spec os abort --hidden-size 32")
    assert line.values["spec"] is None and line.values["hidden_size"] == 32
    (problem,) = line.problems
    assert "--spec os abort, which is code, and no code is taken from a checkpoint; give this --spec again" in problem
    line = taken("--spec os abort", "--spec my_layers my_spec")
    assert not line.problems and line.values["spec"] == ["my_layers", "my_spec"]
    assert not taken("--spec local").problems


def test_words_that_act_are_not_acted_on(tmp_path):
    """Help would end the program, a config file would be read, a checkpoint of a checkpoint would be opened."""
    words = f"--help --config {tmp_path}/none.yaml --use-checkpoint-args --load {tmp_path} --print-config --dry-run -h"
    line = taken(f"{words} --hidden-size 32")
    assert not line.problems and line.given == {"hidden_size": "--hidden-size"}


def test_a_mistake_in_a_flag_that_is_not_taken_does_not_matter():
    """Checkpoints of earlier versions name types in words that the flags do not know."""
    assert not taken("--exp-avg-dtype bfloat16 --hidden-size 32").problems


def test_a_run_goes_on_with_it(saved, tmp_path):
    done = train(f"{RUN} --use-checkpoint-args --load {saved} --finetune --train-iters 1", base="")
    assert len(done.losses) == 1


def test_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="--use-checkpoint-args needs a checkpoint: --load or --pretrained-checkpoint"):
        config_of(TINY)
    config = config_of(f"{TINY} --load {tmp_path}")
    assert f"--use-checkpoint-args: no checkpoint in {tmp_path} yet: the given flags are used" in config.notes
    missing = f"--use-checkpoint-args: no checkpoint in {tmp_path}, and the command line does not describe the model"
    with pytest.raises(UserError, match=f"^{missing}$"):  # and nothing about sizes, which would come from there
        config_of(f"--mock-data --load {tmp_path}")
    with pytest.raises(UserError, match=f"--use-checkpoint-args: {tmp_path} has no checkpoint of iteration 7"):
        config_of(f"{TINY} --load {tmp_path} --ckpt-step 7")


def test_a_script_may_describe_the_model_of_a_first_run(tmp_path, monkeypatch):
    config = config_of(f"{TINY.replace('--hidden-size 32', '')} --load {tmp_path}", {"hidden_size": 48})
    assert config.transformer.hidden_size == 48
    monkeypatch.setattr(sys, "argv", f"script.py --use-checkpoint-args --load {tmp_path}".split())
    assert parse_args().hidden_size is None


def test_the_model_of_a_recipe_gives_way_to_that_of_the_checkpoint(saved):
    """Its optimizer and schedule stay, and a line says so. A flag still wins."""
    config = config_of(f"--load {saved} --recipe llama3-8b --hidden-dropout 0.2")
    assert config.transformer.num_layers == 2 and config.data.seq_length == 16 and config.tokenizer.vocab_size == 40
    assert config.transformer.hidden_dropout == 0.2 and config.schedule.lr_decay_style == "cosine"
    (note,) = [note for note in config.notes if note.startswith("--recipe llama3-8b: --use-checkpoint-args")]
    assert note.endswith("describes the model, so only the recipe's optimizer and schedule are used")
