"""benchmarks/measure_fp8.py runs anywhere and compares every recipe with float32 and with Transformer Engine."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support import fake_transformer_engine as fake

from benchmarks import measure_fp8
from benchmarks.bench_cells import CELLS
from benchmarks.measure_fp8 import Curves, Errors, Pass, apart, compare, first_two_layers, passes, verdict
from megatron.core import backends

MODEL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 1"
)


@pytest.mark.slow
def test_it_compares_gradients_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    text = str(Path(measure_fp8.__file__))
    words = f"{MODEL} --recipes delayed blockwise --tokens 32 --vocabulary 256 --curve 2 --text {text}"
    measure_fp8.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    for kind in ("bf16", "fp8 delayed", "fp8 blockwise"):
        gradients, losses = (line for line in lines if line.startswith(f"{kind}: "))
        assert "cosine at least 0.9" in gradients and "norms within" in gradients
        assert "mean of the last ten" in losses


def test_float32s_curves_of_several_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, flags = tmp_path / "float32.json", MODEL.split()
    text = torch.frombuffer(bytearray(Path(measure_fp8.__file__).read_bytes()), dtype=torch.uint8).long()
    curves = Curves(vocabulary=256, text=text, length=32, steps=2, parts=2)
    losses = curves.kept(flags, kept)
    assert len({tuple(part) for part in losses}) == 2 and all(len(part) == 2 for part in losses)
    monkeypatch.setattr(Curves, "losses", lambda self, flags: [["computed"]] * self.parts)
    assert curves.kept(flags, kept) == losses
    for other in (curves.kept([*flags, "--bf16"], kept), dataclasses.replace(curves, parts=3).kept(flags, kept)):
        assert other[0] == ["computed"]


def test_curves_train_the_first_two_layers() -> None:
    assert first_two_layers(MODEL.split())[-2:] == ["--num-layers", "2"]
    assert first_two_layers(CELLS["MLA"].split())[-2:] == ["--moe-layer-freq", "[0, 1]"]
    assert first_two_layers(["--moe-layer-freq", "2"])[-2:] == ["--moe-layer-freq", "2"]


def test_means_of_curves_have_their_standard_error() -> None:
    said = apart([[3.0, 2.0], [3.5, 2.2]], [[3.0, 1.9], [3.0, 2.0]])
    assert said == "last loss 2.1000, at most 0.5000 apart, mean of the last ten +0.2000 +- 0.1500"
    assert "+-" not in apart([[2.0]], [[1.0]])


@pytest.mark.slow
def test_transformer_engine_computes_the_same_micro_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in for Transformer Engine rounds nothing to fp8, so ours are worse."""
    engine = dataclasses.replace(fake.FAKE, dtypes=(torch.bfloat16,))
    monkeypatch.setattr(backends, "find_engine", lambda: engine)
    fake.used.clear()
    experts = "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --disable-bias-linear"
    more = "--recipes tensorwise --tokens 32 --vocabulary 256 --micro-batches 2 --against-transformer-engine"
    measure_fp8.main(f"{MODEL} {experts} {more}".split())
    assert fake.Float8CurrentScaling() in fake.used
    lines = capsys.readouterr().out.splitlines()
    ours, theirs = (line for line in lines if line.startswith("fp8 tensorwise") and "means of 2" in line)
    assert theirs.startswith("fp8 tensorwise by Transformer Engine: ") and ours.split("[")[0] != theirs.split("[")[0]
    (compared,) = (line for line in lines if line.startswith("fp8 tensorwise beside Transformer Engine: "))
    assert compared.endswith(": worse")


def test_a_comparison_without_transformer_engine_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends before anything is computed, and layers of our own are not measured as Transformer Engine's."""
    monkeypatch.setattr(backends, "find_engine", lambda: "it cannot be imported")
    flags = [*MODEL.split(), *measure_fp8.RECIPES["tensorwise"], *measure_fp8.ENGINE]
    for run in (
        lambda: measure_fp8.main(f"{MODEL} --recipes tensorwise --against-transformer-engine".split()),
        lambda: next(passes(flags, 256, [torch.zeros(1, 33, dtype=torch.long)])),
    ):
        with pytest.raises(SystemExit) as end:
            run()
        printed = capsys.readouterr()
        assert end.value.code == 2 and not printed.out
        assert "--transformer-impl transformer_engine: Transformer Engine does not compute: it cannot" in printed.err


def errors(*cosines: float) -> list[Errors]:
    return [Errors(1.0, {"a": cosine, "b": 1.0}, {"a": 0.0, "b": 0.0}) for cosine in cosines]


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ((0.92, 0.95), (0.93, 0.94), "no worse"),
        ((0.92, 0.94), (0.93, 0.95), "worse"),
        ((0.94, 0.95), (0.93, 0.94), "no worse"),
        ((0.92,), (0.93,), "worse"),
    ],
)
def test_worse_is_what_the_spread_of_micro_batches_does_not_explain(
    ours: tuple[float, ...], theirs: tuple[float, ...], word: str
) -> None:
    assert verdict(errors(*ours), errors(*theirs)).endswith(f": {word}")


def test_gradients_are_compared_by_direction_and_norm() -> None:
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0, 0.0]), "zero": torch.zeros(2)}
    ours = {"a": torch.tensor([3.3, 4.4]), "b": torch.tensor([0.6, 0.8]), "zero": torch.zeros(2)}
    found = compare(Pass(ours, 1.0, []), Pass(exact, 1.0, []))
    assert found.cosines == pytest.approx({"a": 1.0, "b": 0.6}) and found.norms == pytest.approx(
        {"a": 0.1, "b": 0.0}, abs=1e-6
    )
    assert found.worst == "b" and found.longest == "a" and found.distances == pytest.approx((0.4, 0.2, 0.1))
