"""The published tools of docs/handing_on.md: weights that they rounded or pruned come back as a checkpoint."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversion.saved_models import LLAMA, save_checkpoint
from conversion.test_against_transformers import quiet, tensors_of
from support.programs import python

from megatron.conversion.exporting import export_model
from megatron.conversion.importing import import_model
from pretrain_gpt import build_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "handing_on.md"


def script(name: str) -> str:
    """A script of the page, without the lines about the tokenizer, which these models do not have."""
    found = re.search(rf"^cat > {name} <<'PYTHON'\n(.*?)^PYTHON", PAGE.read_text(), flags=re.M | re.S)
    assert found is not None
    return re.sub(r"^AutoTokenizer.*\n|, AutoTokenizer", "", found[1], flags=re.M)


def is_int8(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether each row is at most 255 multiples of one step, near the values before."""
    step = before.abs().amax(1, keepdim=True) / 127.5
    return bool(((after - before).abs() <= step * 0.51).all()) and not torch.equal(before, after)


def is_half_zero(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the smaller half of the values is zero, and the others are as before."""
    limit = before.abs().flatten().kthvalue(before.numel() // 2).values
    return torch.equal(after, torch.where(before.abs() <= limit, 0.0, before))


@pytest.mark.parametrize(
    ("name", "package", "target", "is_changed"),
    [
        ("quantise.py", "compressed_tensors", "llama-int8-hf", is_int8),
        ("prune.py", "torch", "llama-pruned-hf", is_half_zero),
    ],
)
@pytest.mark.slow
def test_there_and_back(
    name: str,
    package: str,
    target: str,
    is_changed: Callable[[torch.Tensor, torch.Tensor], bool],
    tmp_path: Path,
) -> None:
    pytest.importorskip(package)
    root = save_checkpoint(f"{LLAMA} --untie-embeddings-and-output-weights", tmp_path / "run")
    export_model(root, tmp_path / "llama-hf", build_model, dtype=torch.float32, log=quiet)
    (tmp_path / name).write_text(script(name))
    subprocess.run([python(), name], cwd=tmp_path, check=True, timeout=300)
    before, after = tensors_of(tmp_path / "llama-hf"), tensors_of(tmp_path / target)
    done = import_model(tmp_path / target, tmp_path / "back", build_model, verify=True, log=quiet)
    assert done.comparison is not None and done.comparison.difference < 1e-4, "logits of transformers and ours"
    export_model(tmp_path / "back", tmp_path / "again", build_model, log=quiet)
    for tensor, values in tensors_of(tmp_path / "again").items():
        assert torch.equal(values, after[tensor]), "no number changes on the way back"
        if tensor.endswith("_proj.weight"):
            assert is_changed(before[tensor], values), tensor
