"""Files with tensors of single steps, against what the model and the optimizer hold."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.command_lines import problems_of
from support.runs import train, train_on_ranks

from megatron.core.exceptions import UserError
from megatron.training.hooks.step_tensors import StepTensors

DATA = "--mock-data --train-iters 3 --eval-iters 0 --seq-length 8"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --init-method-std 0.5"


def folders(root: Path) -> dict[str, list[str]]:
    kinds = ("params", "wgrads", "dgrads", "activations", "tokens_per_expert")
    return {kind: sorted(path.name for path in (root / kind).glob("iter_*")) for kind in kinds}


def only_file(root: Path, kind: str, iteration: int, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(root / kind / f"iter_{iteration:07d}" / f"rank_{rank:05d}.safetensors")


def test_each_kind_at_its_interval(tmp_path: Path) -> None:
    """With plain SGD the weights of a step are those before, minus the rate times the gradients in the files."""
    flags = (
        f"{DATA} {EXPERTS} --save {tmp_path} --optimizer sgd --sgd-momentum 0 --weight-decay 0 --lr 0.5 --clip-grad 0 "
        "--lr-decay-style constant --save-params-interval 1 --save-wgrads-interval 2 --save-dgrads-interval 3 "
        "--save-activations-interval 3 --save-tokens-per-expert-interval 2"
    )
    run = train(flags)
    assert folders(tmp_path) == {
        "params": [f"iter_000000{n}" for n in (1, 2, 3)],
        "wgrads": ["iter_0000002"],
        "dgrads": ["iter_0000003"],
        "activations": ["iter_0000003"],
        "tokens_per_expert": ["iter_0000002"],
    }
    first, second = (only_file(tmp_path, "params", number) for number in (1, 2))
    gradients = only_file(tmp_path, "wgrads", 2)
    names_of_weights = {
        name.removeprefix("weight ").partition(" (")[0] for name in run.weights
    }  # without numbers of parts
    assert first.keys() == gradients.keys() == names_of_weights
    for name, gradient in gradients.items():
        torch.testing.assert_close(second[name], first[name] - 0.5 * gradient)
    counts = only_file(tmp_path, "tokens_per_expert", 2)
    assert set(counts) == {f"decoder.layers.{n}.mlp.router" for n in (0, 1)}
    assert all(int(count.sum()) == 4 * 8 * 2 for count in counts.values())  # samples, tokens, experts of each
    outputs, back = (only_file(tmp_path, kind, 3) for kind in ("activations", "dgrads"))
    assert outputs["decoder.layers.1.self_attention.linear_proj"].shape[-1] == 32
    assert set(back) <= set(outputs) and all(back[name].shape == outputs[name].shape for name in back)
    assert "decoder.layers.0.self_attention.linear_qkv" in back


def test_sharded_parts_are_whole_together(tmp_path: Path) -> None:
    """Two ranks with all state sharded write each element once; replicas write it once too."""
    flags = f"{DATA} --train-iters 1 --save-params-interval 1 --save-wgrads-interval 1 --fp64"
    train_on_ranks(f"{flags} --save {tmp_path / 'replicas'}", 2)
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    train_on_ranks(f"{flags} {sharded} --save {tmp_path / 'shards'}", 2)
    for kind in ("params", "wgrads"):
        whole = only_file(tmp_path / "replicas", kind, 1)
        assert only_file(tmp_path / "replicas", kind, 1, 1) == {}
        found = {name: torch.full_like(value, float("nan")) for name, value in whole.items()}
        for rank in (0, 1):
            for name, part in only_file(tmp_path / "shards", kind, 1, rank).items():
                name, _, place = name.partition("[")
                start, _, stop = place.rstrip("]").partition(":")
                found[name].view(-1)[int(start or 0) : int(stop) if stop else None] = part.flatten()
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "params").write_text("")
    hook = StepTensors(tmp_path, [], None, {"params": 1})  # type: ignore[arg-type]
    hook.groups = type("Groups", (), {"global_rank": 0})  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"--save-params-interval: .*rank_00000"):
        hook._write("params", 1, {})


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(tensors: object, path: Path) -> None:
        path.write_bytes(b"the beginning")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("megatron.training.hooks.step_tensors.save_file", fails)
    hook = StepTensors(tmp_path, [], None, {"params": 1})  # type: ignore[arg-type]
    hook.groups = type("Groups", (), {"global_rank": 0})  # type: ignore[assignment]
    hook._write("params", 1, {})
    warning = capsys.readouterr().out
    assert warning.startswith("WARNING: --save-params-interval: ") and "is not written: No space left" in warning
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_modules_of_a_graph_are_not_watched() -> None:
    (problem,) = problems_of("--cuda-graph-impl local --save x --save-dgrads-interval 2")
    assert "--save-dgrads-interval watches modules" in problem
