"""A GPT and the hybrid model of its layers: names, descriptions, and checkpoints that go both ways."""

from pathlib import Path

import pytest
import torch
from support.command_lines import SMALL, configured, without
from support.runs import TINY, differences, state_at_end, state_at_start, train, train_all_on_ranks

from megatron.core.exceptions import UserError
from megatron.training.inspection.gpt_spelling import is_gpt_pattern, to_gpt, to_hybrid
from megatron.training.inspection.run_description import architecture_differences, describe_run

BASE = TINY.replace("--num-layers 2 ", "")
FLAGS = "--fp64 --mock-data --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
SPLIT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def test_patterns_of_a_gpt() -> None:
    assert all(map(is_gpt_pattern, ("*-", "*-*E", "*-|*-", "*-*E/*E/*E")))
    assert not any(map(is_gpt_pattern, (None, "", "*", "-*", "M-*-", "*-*E/*-", "*--", "D-")))


def test_names_go_there_and_back() -> None:
    names = {
        "decoder.layers.1.self_attention.linear_qkv.weight": "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.1.input_layernorm.weight": "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.3.pre_mlp_layernorm.weight": "decoder.layers.7.pre_mlp_layernorm.weight",
        "optimizer.exp_avg.decoder.layers.12.mlp.experts.3.linear_fc1.weight": "optimizer.exp_avg.decoder.layers.25.mlp"
        ".experts.3.linear_fc1.weight",
        "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight": "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight",
        "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    }
    for gpt, hybrid in names.items():
        assert to_hybrid(gpt) == hybrid and to_gpt(hybrid) == gpt


@pytest.mark.parametrize(
    ("gpt", "hybrid", "named"),
    [
        ("--num-layers 2", "*-*-", None),
        ("--num-layers 2", "*-*-*-", "--num-layers is 3 in this run and 2"),
        ("--num-layers 2", "*-M- --mamba-num-groups 1", "--hybrid-layer-pattern"),
        ("--num-layers 2 --num-experts 4", "*E*E --num-experts 4", None),
        ("--num-layers 2 --num-experts 4", "*-*E --num-experts 4", "--moe-layer-freq"),
        ("--num-layers 2 --num-experts 4 --moe-layer-freq [0,1]", "*-*E --num-experts 4", None),
        ("--num-layers 4 --num-experts 4 --moe-layer-freq 2", "*E*-*E*- --num-experts 4", None),
        ("--num-layers 2 --mtp-num-layers 1", "*-*-/*-", None),
        ("--num-layers 2 --mtp-num-layers 1", "*-*-", "--mtp-num-layers"),
        (
            "--num-layers 4 --window-size 8,0 --window-attn-skip-freq 2",
            "*-*-*-*- --window-size 8,0 --window-attn-skip-freq [1,0,0,0,1,0,0,0]",
            None,
        ),
        (
            "--num-layers 4 --window-size 8,0 --window-attn-skip-freq 2",
            "*-*-*-*- --window-size 8,0 --window-attn-skip-freq 2",
            "--window-attn-skip-freq",
        ),
    ],
)
def test_the_same_model_has_no_differences(gpt: str, hybrid: str, named: str | None) -> None:
    base = without("--num-layers")
    assert base != SMALL
    one = configured(f"{gpt} --position-embedding-type rope", base=base)
    other = configured(f"--hybrid-layer-pattern {hybrid} --position-embedding-type rope", base=base)
    found = architecture_differences(other, describe_run(one))
    assert found == [] if named is None else any(named in line for line in found), found
    assert bool(architecture_differences(one, describe_run(other))) == (named is not None)


def test_a_checkpoint_of_each_continues_as_the_other(tmp_path: Path) -> None:
    """To the bit, in losses, weights and state of the optimizer. Clipping is off, since the sum of a gradient's norm is
    taken layer by layer, and rounds otherwise over other layers."""
    spelled = {"gpt": f"--num-layers 2 {EXPERTS}", "hybrid": f"--hybrid-layer-pattern *E*E {EXPERTS}"}
    for first, second, renamed in (("gpt", "hybrid", to_hybrid), ("hybrid", "gpt", to_gpt)):
        flags, folder = f"{FLAGS} --train-iters 4 --clip-grad 0", tmp_path / first
        whole = train(f"{flags} {spelled[first]} --save {folder} --save-interval 2", base=BASE)
        rest = train(f"{flags} {spelled[second]} --load {folder} --ckpt-step 2", base=BASE)
        assert rest.losses == whole.losses[2:] and len(rest.losses) == 2
        ends = {renamed(name): value for name, value in state_at_end([whole]).items()}
        assert differences(ends, state_at_end([rest])) == []


@pytest.mark.slow_cases("hybrid")
@pytest.mark.parametrize("first", ["gpt", "hybrid"])
def test_a_checkpoint_crosses_the_spelling_and_the_layout(first: str, tmp_path: Path) -> None:
    """What two by two ranks load of the other spelling is what they load of their own, and so is the loss. They save it
    in their spelling, and one process goes on with it in the first."""
    spelled = {"gpt": "--num-layers 2", "hybrid": "--hybrid-layer-pattern *-*-"}
    second, renamed = {"gpt": ("hybrid", to_hybrid), "hybrid": ("gpt", to_gpt)}[first]
    flags = f"{FLAGS} --lr-decay-iters 8 --train-iters"
    train(f"{flags} 2 {spelled[first]} --save {tmp_path}", base=BASE)
    load = f"{flags} 3 --load {tmp_path} {SPLIT}"
    runs = [f"{load} {spelled[first]}", f"{load} {spelled[second]} --save {tmp_path / second}"]
    ranks = train_all_on_ranks(runs, 4, base=BASE)
    same, other = ([rank[run] for rank in ranks] for run in (0, 1))
    starts = {renamed(name): value for name, value in state_at_start(same).items()}
    assert differences(starts, state_at_start(other)) == []
    assert other[-1].losses == same[-1].losses and len(other[-1].losses) == 1
    back = train(f"{flags} 4 {spelled[first]} --load {tmp_path / second}", base=BASE)
    starts = {renamed(name): value for name, value in state_at_start([back]).items()}
    assert differences(starts, state_at_end(other)) == [] and len(back.losses) == 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    train(f"{FLAGS} --train-iters 1 --num-layers 2 --save {tmp_path}", base=BASE)
    with pytest.raises(UserError, match="--hybrid-layer-pattern is"):
        train(f"{FLAGS} --train-iters 1 --hybrid-layer-pattern *-M- --mamba-num-groups 1 --load {tmp_path}", base=BASE)
    assert torch.is_grad_enabled()
