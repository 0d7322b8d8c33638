"""Runs in fp8: scales of delayed scaling in checkpoints, weights that stay exact, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import fake_transformer_engine as fake
from support.runs import Outcome, differences, train, train_on_ranks

from megatron.core import backends

FLAGS = (
    "--mock-data --micro-batch-size 2 --eval-interval 3 --eval-iters 1 --hidden-size 32 --ffn-hidden-size 64 "
    "--fp8-format hybrid"
)
DELAYED = f"{FLAGS} --fp8-amax-history-len 3 --fp8-amax-compute-algo max"


def histories(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outcome.weights.items() if name.endswith("amax_history")}


def test_a_run_with_delayed_scaling_resumes_bit_equal(tmp_path: Path) -> None:
    flags = f"{DELAYED} --bf16 --train-iters 5"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2")
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 2")
    found = histories(resumed)
    assert len(found) == 8 and all(value.dtype is torch.float32 and (value > 0).all() for value in found.values())
    assert differences(straight.at_end, resumed.at_end) == []
    assert straight.losses[2:] == resumed.losses


def test_evaluations_do_not_change_delayed_scaling() -> None:
    often, never = (train(f"{DELAYED} --bf16 --train-iters 4 --eval-interval {n}") for n in (1, 100))
    assert often.losses == never.losses and differences(often.at_end, never.at_end) == ["state"]  # samples evaluated


def test_scales_go_to_another_layout(tmp_path: Path) -> None:
    flags = f"{DELAYED} --fp64 --train-iters 4"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2")
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    expected = histories(straight)
    for rank in train_on_ranks(f"{flags} --load {tmp_path} --ckpt-step 2 {layout}", 4):
        found = histories(rank)
        assert found.keys() == expected.keys()
        for name, history in found.items():
            torch.testing.assert_close(history, expected[name], rtol=1e-6, atol=0.0)
        assert rank.losses == pytest.approx(straight.losses[2:], rel=1e-9)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_other_recipes_keep_nothing_in_a_checkpoint(recipe: str) -> None:
    outcome = train(f"{FLAGS} --fp8-recipe {recipe} --bf16 --train-iters 2")
    assert not histories(outcome)
    assert outcome.losses != train(f"{FLAGS.replace('--fp8-format hybrid', '')} --bf16 --train-iters 2").losses


LOW = {"mxfp8": ("--fp8-format hybrid --fp8-recipe mxfp8", 0.02), "nvfp4": ("--fp4-format e2m1", 0.2)}
"""Flags, and how far losses may be from those of float32."""


@pytest.mark.parametrize("recipe", LOW)
def test_emulated_formats_train_nearly_as_float32(recipe: str) -> None:
    (low, bound), flags = LOW[recipe], FLAGS.replace("--fp8-format hybrid", "--train-iters 8")
    expected, found = train(flags), train(f"{flags} {low}")
    assert expected.losses[-1] < expected.losses[0] - 0.5
    gaps = [abs(one - other) for one, other in zip(expected.losses, found.losses, strict=True)]
    assert 1e-5 < max(gaps) < bound, gaps
    assert not histories(found)


def test_layers_at_both_ends_stay_out_of_fp4() -> None:
    flags = f"{FLAGS.replace('--fp8-format hybrid', '--bf16')} --train-iters 2"
    without, all_layers = train(flags), train(f"{flags} --fp4-format e2m1")
    ends = f"{flags} --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 1"
    assert train(ends).losses == without.losses != all_layers.losses  # both of two layers
    assert train(f"{ends} --num-layers-at-end-in-bf16 0").losses not in (without.losses, all_layers.losses)


def test_weights_need_not_stay_quantised() -> None:
    flags = f"{DELAYED} --bf16 --train-iters 3"
    kept, again = train(flags), train(f"{flags} --no-fp8-weight-cache")
    assert kept.losses == again.losses and differences(kept.at_end, again.at_end) == []


def test_layers_at_both_ends_stay_in_the_models_type() -> None:
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 1"
    found = histories(train(f"{DELAYED} --bf16 --train-iters 1 {ends}"))
    assert len(found) == 4 and all("layers.0." in name for name in found)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-padding-for-fp8"


@pytest.mark.fast("--moe-grouped-gemm --moe-router-padding-for-quantization")
@pytest.mark.parametrize("grouped", ["", "--moe-grouped-gemm --moe-router-padding-for-quantization"])
def test_experts_with_delayed_scaling_resume_bit_equal(grouped: str, tmp_path: Path) -> None:
    flags = f"{DELAYED} {EXPERTS} {grouped} --bf16 --train-iters 3"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2")
    found = histories(straight)
    assert len(found) == 8 and all((value > 0).all() for value in found.values())
    assert sum(".mlp.experts.linear_fc" in name for name in found) == 4  # one for all experts
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 2")
    assert differences(straight.at_end, resumed.at_end) == [] and straight.losses[2:] == resumed.losses


@pytest.mark.parametrize("fp8", [False, True])
def test_checkpoints_with_and_without_transformer_engine_are_the_same(
    fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "find_engine", lambda: fake.FAKE)
    fake.used.clear()
    flags = f"{DELAYED if fp8 else FLAGS.replace('--fp8-format hybrid', '')} --fp64 --lr-decay-iters 9 --eval-iters 0"
    engine = f"{flags} --transformer-impl transformer_engine"
    ours = train(f"{flags} --train-iters 2 --save {tmp_path / 'ours'}")
    assert not fake.used
    its = train(f"{engine} --train-iters 3 --load {tmp_path / 'ours'} --save {tmp_path / 'its'}")
    assert fake.used and all((recipe is not None) == fp8 for recipe in fake.used)
    assert ("8 keys of the checkpoint are not used" in capsys.readouterr().out) == fp8
    assert differences(tensors(ours.at_end), tensors(its.at_start)) == []
    back = train(f"{flags} --train-iters 4 --load {tmp_path / 'its'}")
    assert ("8 keys are not in the checkpoint and keep their values" in capsys.readouterr().out) == fp8
    assert differences(tensors(its.at_end), tensors(back.at_start)) == []
    assert len(histories(back)) == 8 * fp8 and all((value > 0).any() for value in histories(back).values())
    again = train(f"{engine} --train-iters 4 --load {tmp_path / 'its'}")
    assert ("its history is not in checkpoints" in capsys.readouterr().out) == fp8
    assert differences(tensors(its.at_end), tensors(again.at_start)) == [] and len(again.losses) == 1


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights and the optimizer's tensors, without histories of delayed scaling."""
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in found.items() if not name.endswith("amax_history")}
