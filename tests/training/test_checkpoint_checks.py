"""Which checkpoints a run may load: those of its model, with the state that the flags ask for."""

import re
from types import SimpleNamespace

import pytest
from support.command_lines import configured
from support.small_run import SmallRun, equal

from megatron.core.exceptions import UserError
from megatron.training.checkpoint_checks import check_before_build, check_manifest, check_vocabulary
from megatron.training.lr_schedule import build_scheduler


@pytest.fixture
def saved(tmp_path) -> SmallRun:
    run = SmallRun.make(f"--save {tmp_path}").train(2)
    run.save()
    run.train(2).save()
    return run


def test_another_model_is_refused_by_flag_and_finetune_says_so(saved, tmp_path, capsys):
    other = "--norm-epsilon 1e-6 --swiglu"
    with pytest.raises(UserError) as error:
        SmallRun.make(f"--load {tmp_path} {other}").load()
    message = str(error.value)
    assert "--norm-epsilon is 1e-06 in this run and 1e-05 in the checkpoint" in message
    assert "--finetune to change the model on purpose" in message
    with pytest.raises(UserError) as early:
        check_before_build(configured(f"--load {tmp_path} {other}"), schedule_of_flags=False)
    assert str(early.value) == message
    for accepted in ("", f"{other} --finetune", f"{other} --ckpt-step 77"):  # `load` reports a missing step
        check_before_build(configured(f"--load {tmp_path} {accepted}"), schedule_of_flags=False)
    capsys.readouterr()
    assert SmallRun.make(f"--load {tmp_path} {other} --finetune").load()
    assert "WARNING: --norm-epsilon is 1e-06 in this run and 1e-05 in the checkpoint" in capsys.readouterr().out


def test_another_schedule_is_refused_early(tmp_path):
    """In temporary checkpoints, too. If one checkpoint fits, which may be the newest, `load` decides."""
    other = "--non-persistent-save-interval 1 --min-lr 1e-5"
    for folder in (tmp_path / "non_persistent", tmp_path):
        run = SmallRun.make(f"--save {folder}").train(1)
        run.save()
        with pytest.raises(UserError, match="--min-lr"):
            check_before_build(configured(f"--load {tmp_path} --save {tmp_path} {other}"))
    fitting = configured(f"--load {tmp_path} --save {tmp_path} {other}")
    run.scheduler = build_scheduler(fitting, run.optimizer)
    run.train(1).save()
    check_before_build(fitting)


def test_only_checkpoints_that_can_be_read_refuse_a_model(saved, tmp_path):
    for manifest in tmp_path.glob("iter_*/manifest.json"):
        manifest.write_text("{")
    check_before_build(configured(f"--load {tmp_path} --norm-epsilon 1e-6"), schedule_of_flags=False)


def test_flags_without_meaning_for_the_model_are_not_compared(saved, tmp_path):
    assert SmallRun.make(f"--load {tmp_path} --rotary-base 5").load()  # positions are learned


def test_a_checkpoint_without_optimizer_state(tmp_path, capsys):
    run = SmallRun.make(f"--save {tmp_path} --no-save-optim").train(2)
    run.save()
    with pytest.raises(UserError, match=r"was saved without optimizer state.*--no-load-optim"):
        SmallRun.make(f"--load {tmp_path}").load()
    other = SmallRun.make(f"--load {tmp_path} --no-load-optim", seed=77)
    other.load()
    assert equal(other.weights(), run.weights()) and other.state == run.state


def test_keys_that_do_not_fit(saved, tmp_path, capsys):
    with pytest.raises(UserError, match=r"keys of this run are not in it: layers\.3\.bias, .*layers\.3\.norm"):
        SmallRun.make(f"--load {tmp_path}", layers=4).load()
    with pytest.raises(UserError, match=r"keys are not used by this run: layers\.2\.bias"):
        SmallRun.make(f"--load {tmp_path}", layers=2).load()
    capsys.readouterr()
    assert SmallRun.make(f"--load {tmp_path} --dist-ckpt-strictness log_all", layers=2).load()
    out = capsys.readouterr().out
    assert re.search(r"keys of the checkpoint are not used: layers\.2\.bias", out)
    assert SmallRun.make(f"--load {tmp_path} --ckpt-waive-keys *layers.2.*", layers=2).load()
    with pytest.raises(
        UserError, match=r"embedding\.table has shape \[13, 8\] in this run and \[13, 6\] .* --finetune,"
    ):
        SmallRun.make(f"--load {tmp_path}", width=8).load()


def test_a_vocabulary_of_another_size_is_refused_before_the_model_is_built(tmp_path, monkeypatch):
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002/manifest.json").touch()
    chunk = SimpleNamespace(global_shape=(101, 16))
    stored = SimpleNamespace(
        folder=tmp_path, catalogue={"embedding.word_embeddings.weight": [SimpleNamespace(chunk=chunk)]}
    )
    monkeypatch.setattr("megatron.training.checkpoint_checks.open_checkpoint", lambda folder: stored)
    for flags in (f"--load {tmp_path}", f"--load {tmp_path} --finetune", f"--pretrained-checkpoint {tmp_path}"):
        with pytest.raises(UserError, match=r"gives a vocabulary of 51 ids in this run, .* has 101: give"):
            check_vocabulary(configured(flags), (51, 128))
        check_vocabulary(configured(flags), (101, 128))
        check_vocabulary(configured(flags), (100, 101))  # a model of a script may store its padding
    check_vocabulary(configured(""), (51, 128))


def test_weights_of_another_tokenizer_are_told():
    said = []
    manifest = SimpleNamespace(config={"command_line": ["--tokenizer-type", "GPT2BPETokenizer"]})
    check_manifest(configured(""), manifest, said.append, weights_only=True, with_optimizer=False)
    assert said == [
        "WARNING: --tokenizer-type is NullTokenizer in this run and was GPT2BPETokenizer when the checkpoint was saved"
        ": the same id may mean another text now"
    ]
