"""The table of GPUs, and files of the same form."""

from pathlib import Path

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning import gpus
from megatron.diagnosis.planning.gpus import gpu_named, known_gpus
from megatron.training.log.throughput import peak_of_device_name

FIGURE = '{value = 1e12, error = 0.1, source = "a test"}'
FILE = "[mine]\ntitle = 'Mine'\nmultiprocessors = 10\n" + "".join(
    f"{key} = {FIGURE}\n"
    for key in ("memory", "bf16_peak", "bf16_products", "attention_64", "attention_128", "copy", "layer_launch")
)


def test_the_table_has_the_usual_gpus() -> None:
    assert {"a100-40gb", "a100-80gb", "h100", "h100-pcie", "h200", "b200", "rtx-4090", "l40s"} <= set(known_gpus())
    assert gpu_named("A100") == gpu_named("a100-80gb") and gpu_named("H100").name == "h100"


@pytest.mark.parametrize("name", known_gpus())
def test_figures_are_possible(name: str) -> None:
    gpu = gpu_named(name)
    assert gpu.bf16_products.value < gpu.bf16_peak.value and gpu.attention_64.value < gpu.attention_128.value
    assert 10e9 < gpu.memory.value < 300e9 and (gpu.nvlink is None) == (gpu.collectives is None)
    assert gpu.collectives is not None or gpu.pcie is not None
    assert (gpu.fp8_peak is None) == (gpu.fp8_products is None)
    # A rate that was not measured here is less certain than one of an H200.
    assert name == "h200" or gpu.bf16_products.error > gpu_named("h200").bf16_products.error


@pytest.mark.parametrize(
    ("name", "device"),
    [("h200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3"), ("b200", "NVIDIA B200"), ("l40s", "NVIDIA L40S")],
)
def test_peaks_are_those_of_the_log(name: str, device: str) -> None:
    gpu = gpu_named(name)
    assert gpu.bf16_peak.value / 1e12 == peak_of_device_name(device, torch.bfloat16)
    assert gpu.fp8_peak is not None
    assert gpu.fp8_peak.value / 1e12 == peak_of_device_name(device, torch.bfloat16, fp8=True)


def test_a_file_describes_another_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    gpu = gpu_named(str(path))
    assert (gpu.name, gpu.title, gpu.copy.value, gpu.nic) == ("mine", "Mine", 1e12, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one table, such as .my-gpu., and found 0"),
        (f"{FILE}\n[second]\n", "expected one table, such as .my-gpu., and found 2"),
        ("[", "this file cannot be read as TOML: "),
        (FILE.replace("copy", "cpy"), r"\[mine\] has the unknown key cpy; known are title, "),
        (FILE.replace(f"copy = {FIGURE}\n", ""), r"\[mine\] lacks copy$"),
        (
            FILE.replace("multiprocessors = 10", "multiprocessors = 'x'"),
            r"\[mine\] multiprocessors = 'x': expected a number of 1",
        ),
        (FILE.replace("error = 0.1", "error = 1.5", 1), r"\[mine\] memory: expected .* and an error below 1"),
        (FILE.replace(FIGURE, "1e12", 1), r"\[mine\] memory: expected {value = 1e12, "),
        (FILE.replace("value = 1e12", "value = true", 1), r"\[mine\] memory: expected .* with a positive value"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"^--gpu .*mine.toml: {message}"):
        gpu_named(str(path))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"^--gpu h1000: no such GPU and no such file; known are h200, h100, "):
        gpu_named("h1000")


def test_the_table_is_part_of_the_package() -> None:
    project = (Path(gpus.__file__).parents[3] / "pyproject.toml").read_text()
    assert '"diagnosis/planning/*.toml"' in project
