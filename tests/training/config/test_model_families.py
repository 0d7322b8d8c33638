"""Rules of BERT and T5 runs, and flags that only some families read."""

import pytest
from support.command_lines import SMALL, without

from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment

DATA = without("--mock-data") + " --data-path some/prefix"
NO_LENGTH = DATA.replace("--seq-length 128", "")


def configured(family: str | None, flags: str, base: str = DATA):
    defaults = {} if family is None else {"model_family": family}
    words = f"{base} {flags}".split()
    return configure(words, args_defaults=defaults, launch_environment=LaunchEnvironment(1, False))


@pytest.mark.parametrize(
    ("family", "flags", "base", "problem"),
    [
        ("bert", "--seq-length 4", DATA, "--seq-length 4: a sample of BERT has three special tokens and at least two"),
        ("t5", "--seq-length 3 --decoder-seq-length 9", DATA, "--seq-length 3: a sample of T5 has at least two tokens"),
        (
            "t5",
            "--encoder-seq-length 3 --decoder-seq-length 9",
            NO_LENGTH,
            "--encoder-seq-length 3: a sample of T5 has",
        ),
        ("t5", "", DATA, "--decoder-seq-length is missing: the tokens of the decoder's part"),
        ("bert", "--mask-prob 0", DATA, "--mask-prob 0.0: expected a fraction between 0 and 1, such as 0.15"),
        ("bert", "--short-seq-prob 2", DATA, "--short-seq-prob 2.0: expected a fraction from 0 to 1, such as 0.1"),
    ],
)
def test_samples_that_cannot_be_made(family: str, flags: str, base: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        configured(family, flags, base)
    assert len(error.value.problems) == 1 and error.value.problems[0].startswith(problem), error.value.problems


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--calculate-per-token-loss", "--calculate-per-token-loss: the loss of the binary head is per sample"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: BERT predicts masked tokens only"),
        ("--multi-latent-attention", "--multi-latent-attention: not yet for BERT"),
        ("--heterogeneous-layers-config-path x", "--heterogeneous-layers-config-path: not yet for BERT"),
    ],
)
def test_what_bert_does_not_have(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        configured("bert", flags)
    assert any(line.startswith(problem) for line in error.value.problems), error.value.problems
    configured("gpt", "--calculate-per-token-loss")
    configured("bert", "--calculate-per-token-loss --bert-no-binary-head --spec local")


def test_context_parallelism_is_refused_by_name_for_bert() -> None:
    words = f"{DATA} --context-parallel-size 2".split()
    environment = LaunchEnvironment(2, False)
    with pytest.raises(ConfigurationError, match="--context-parallel-size 2: not yet for BERT"):
        configure(words, args_defaults={"model_family": "bert"}, launch_environment=environment)


def test_a_flag_of_another_family_has_no_effect() -> None:
    flags = "--mask-prob 0.2 --decoder-seq-length 16 --bert-no-binary-head --eod-mask-loss"

    def idle(family: str | None) -> list[str]:
        return [note for note in configured(family, flags).notes if "has no effect for" in note]

    assert idle("gpt") == [
        "--bert-no-binary-head: has no effect for GPT",
        "--decoder-seq-length 16: has no effect for GPT",
        "--mask-prob 0.2: has no effect for GPT",
    ]
    assert idle("bert") == [
        "--decoder-seq-length 16: has no effect for BERT",
        "--eod-mask-loss: has no effect for BERT",
    ]
    assert len(idle("t5")) == 2 and idle(None) == []
    assert configured("bert", flags).model.model_family == "bert" and configured(None, flags).model.model_family is None


@pytest.mark.parametrize(
    ("family", "words", "problem"),
    [
        ("gpt", "nowhere layers", "--spec nowhere layers: spec (nowhere, layers) names nothing that can be imported"),
        ("bert", "math layers", "--spec math layers: spec (math, layers) names nothing that can be imported"),
        ("gpt", "layers", "--spec layers: expected a module and a name in it"),
        ("gpt", "local", None),
        ("gpt", "megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec", None),
    ],
)
def test_layers_of_a_spec(family: str, words: str, problem: str | None) -> None:
    base = SMALL if family == "gpt" else DATA
    try:
        configured(family, f"--spec {words}", base)
    except ConfigurationError as error:
        assert problem is not None and len(error.problems) == 1 and error.problems[0].startswith(problem)
    else:
        assert problem is None
