"""tools/measure_fp8.py runs anywhere and compares every recipe with float32."""

from pathlib import Path

import pytest

from tools import measure_fp8

MODEL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 1"
)


def test_it_compares_gradients_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    text = str(Path(measure_fp8.__file__))
    words = f"{MODEL} --recipes delayed blockwise --tokens 32 --vocabulary 256 --curve 2 --text {text}"
    measure_fp8.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    for kind in ("bf16", "fp8 delayed", "fp8 blockwise"):
        gradients, losses = (line for line in lines if line.startswith(f"{kind}: "))
        assert "cosine at least 0.9" in gradients and "norms within" in gradients
        assert "mean of the last ten" in losses
