"""A record of measured rates is one that the planner reads."""

from pathlib import Path

from megatron.diagnosis.doctor.gpu_record import known_gpu, record_text
from megatron.diagnosis.doctor.measurement import Rates
from megatron.diagnosis.planning.gpus import gpu_named

RATES = [Rates(690e12, 4.2e12, 400e12, 530e12), Rates(650e12, 4.0e12, 390e12, 520e12)]


def test_a_record_reads_back_with_medians_and_the_data_sheets_peak(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(record_text("NVIDIA H200", 132, 150_000_000_000, RATES, {"nvlink": 380e9}))
    gpu, table = gpu_named(str(path)), gpu_named("h200")
    assert gpu.name == "nvidia-h200" and gpu.multiprocessors == 132 and gpu.memory.value == 150e9
    assert gpu.bf16_products.value == 670e12 and gpu.copy.value == 4.1e12 and gpu.attention_64.value == 395e12
    assert "tools/doctor.py --measure on 2 NVIDIA H200" in gpu.bf16_products.source
    assert gpu.bf16_peak == table.bf16_peak and gpu.fp8_products == table.fp8_products
    assert gpu.nvlink is not None and gpu.nvlink.value == 380e9 and gpu.collectives == table.collectives


def test_a_gpu_that_the_table_lacks_says_so(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(record_text('Tesla "T4"', 40, 16_000_000_000, RATES[:1], {}))
    gpu = gpu_named(str(path))
    assert gpu.title == 'Tesla "T4"' and gpu.bf16_peak.source == "measured products, as no data sheet is known"
    assert gpu.nvlink is None


def test_names_of_torch() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB")
    assert [known.name for name in names if (known := known_gpu(name))] == [
        "h100",
        "h100-pcie",
        "a100-80gb",
        "a100-40gb",
    ]
    assert known_gpu("Tesla T4") is None
