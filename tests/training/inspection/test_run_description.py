"""The description of a run in a checkpoint: its flags give the same config again; its architecture is compared."""

import dataclasses
import json

import pytest
import torch
from support.command_lines import SMALL, configured

from megatron.core.exceptions import UserError
from megatron.training.inspection.run_description import (
    ARCHITECTURE,
    architecture_differences,
    check_architecture,
    check_trained_parts,
    command_line_of,
    describe_run,
    setting_differences,
)

FLAGS = [
    "",
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --rotary-base 500000",
    "--untie-embeddings-and-output-weights --num-query-groups 2 --group-query-attention --qk-layernorm",
    "--bf16 --squared-relu --kv-channels 8 --attention-dropout 0 --data-path 1 a_document 2 b_document --split 9,1,0",
    "--save a --load b --keep-last 2 --log-throughput --eval-interval 5",
    "--window-size 5,0 --window-attn-skip-freq [0,1] --no-rope-freq 2",
]


def config_of(flags):
    return configured(flags, base=SMALL.replace("--mock-data", "") if "--data-path" in flags else SMALL)


def without_provenance(config):
    return {
        name: value for name, value in config.flat().items() if not (callable(value) or dataclasses.is_dataclass(value))
    }


@pytest.mark.parametrize("flags", FLAGS)
def test_the_command_line_gives_the_same_config_again(flags):
    base = config_of(flags)
    words = command_line_of(base)
    again = configured(" ".join(words), base="")
    assert without_provenance(again) == without_provenance(base)
    assert describe_run(again) == describe_run(base)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_description_is_json(flags):
    described = describe_run(config_of(flags))
    assert json.loads(json.dumps(described)) == described


def test_another_choice_of_what_is_trained_is_named():
    sparse = "--experimental-attention-variant dsa --multi-latent-attention --dsa-indexer-n-heads 2 "
    sparse += "--dsa-indexer-head-dim 64 --dsa-indexer-topk 4"
    without, trained, more = (
        configured(f"{sparse} {flag}") for flag in ("", "--dsa-indexer-loss-coeff 0.1", "--dsa-indexer-loss-coeff 0.2")
    )
    check_trained_parts(more, describe_run(trained))
    check_trained_parts(without, describe_run(without))
    with pytest.raises(UserError, match=r"coeff 0.1 trains the indexer .* lacks .* had not set\).* --no-load-optim"):
        check_trained_parts(trained, describe_run(without))
    with pytest.raises(UserError, match=r"without --dsa-indexer-loss-coeff .* has that of .* 0.1\).* --no-load-optim"):
        check_trained_parts(without, describe_run(trained))


def test_every_architecture_value_is_a_setting():
    assert set(ARCHITECTURE) <= configured("--multi-latent-attention").flat().keys()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--hidden-size 128", "--hidden-size is 128 in this run and 64 in the checkpoint"),
        (
            "--swiglu --ffn-hidden-size 256",
            "the activation (--swiglu, --geglu, --exact-geglu, --quick-geglu, --squared-relu, --relu, --openai-gelu or "
            "none) is silu "
            "in this run and gelu in the checkpoint",
        ),
        ("--disable-bias-linear", "--disable-bias-linear is True in this run and False in the checkpoint"),
        ("--qk-layernorm", "--qk-layernorm is True in this run and False in the checkpoint"),
        ("--rotary-base 7", None),
        ("--attention-dropout 0 --hidden-dropout 0 --bf16 --seed 7 --max-position-embeddings 256", None),
    ],
)
def test_what_makes_another_model_is_named(flags, named):
    config, described = configured(flags), describe_run(configured())
    if named is None:
        assert architecture_differences(config, described) == []
        check_architecture(config, described)
        return
    assert named in architecture_differences(config, described)
    with pytest.raises(
        UserError, match=r"--use-checkpoint-args to take .*, or --finetune to change the model on purpose"
    ):
        check_architecture(config, described)


@pytest.mark.parametrize(
    "flags",
    [
        "--position-embedding-type rope",
        "--multi-latent-attention --kv-channels 16",
        "--num-experts 4 --moe-router-topk 3",
    ],
)
def test_what_follows_from_one_flag_is_one_sentence(flags):
    """Either way round: frequencies are no use without rotary positions, nor a router without experts."""
    one, other = configured(flags), configured()
    for config, described in ((one, other), (other, one)):
        (sentence,) = architecture_differences(config, describe_run(described))
        assert sentence.startswith(flags.split()[0])


def test_of_two_with_experts_the_routers_are_compared():
    described = describe_run(configured("--num-experts 4"))
    assert architecture_differences(configured("--num-experts 4 --moe-router-topk 3"), described) == [
        "--moe-router-topk is 3 in this run and 2 in the checkpoint"
    ]


def test_a_checkpoint_that_says_nothing_of_its_run_is_not_compared():
    assert architecture_differences(configured(), {}) == []


def test_settings_with_which_a_run_goes_on_otherwise_are_named():
    """--seed and the data: a resumed run may change them, and then a line says so."""
    before = describe_run(configured("--seed 1 --split 90,10,0"))
    assert setting_differences(configured("--seed 1 --split 90,10,0"), before) == []
    assert setting_differences(configured("--clip-grad 0.5"), {**before, "torch": "1.0"}) == [
        "--seed is 1234 in this run and was 1 when the checkpoint was saved",
        "--split is not set in this run and was 90,10,0 when the checkpoint was saved",
        "--clip-grad is 0.5 in this run and was 1.0 when the checkpoint was saved",
        f"torch is {torch.__version__} in this run and was 1.0 when the checkpoint was saved",
    ]
    assert setting_differences(configured(""), {}) == []


def test_fields_without_effect_in_older_descriptions_are_not_compared() -> None:
    """Checkpoints of earlier versions have fields that their model does not read."""
    rope = "--position-embedding-type rope"
    described = describe_run(configured(rope))
    unread = {"rope_scaling_factor": 8.0, "add_qkv_bias": True, "mscale": 1.0, "rotary_scaling_factor": 40}
    assert not unread.keys() & described["architecture"].keys()
    described["architecture"] |= unread
    assert architecture_differences(configured(rope), described) == []
    (sentence,) = architecture_differences(configured(f"{rope} --use-rope-scaling --rope-scaling-factor 4"), described)
    assert sentence.startswith("--use-rope-scaling is ")
    grouped = describe_run(configured("--group-query-attention --num-query-groups 2"))
    assert architecture_differences(configured(), grouped)
