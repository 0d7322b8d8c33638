"""The file of --nccl-communicator-config-path: what it may contain, and sentences for what is wrong."""

from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import GROUPS_WITH_SETTINGS
from megatron.core.utils.communicator_settings import read_communicator_settings


def read(folder: Path, text: str) -> object:
    (folder / "nccl.yaml").write_text(text)
    return read_communicator_settings(str(folder / "nccl.yaml"), GROUPS_WITH_SETTINGS)


def test_settings_by_group(tmp_path: Path) -> None:
    text = "dp: {max_ctas: 8, is_high_priority_stream: true}\nep_dp:\n  cga_cluster_size: 4\n  net_name: IB\n"
    assert read(tmp_path, text) == {
        "dp": {"max_ctas": 8, "is_high_priority_stream": True},
        "expt_dp": {"cga_cluster_size": 4, "net_name": "IB"},  # an older name
    }


def test_a_smallest_number_comes_with_a_largest_one(tmp_path: Path) -> None:
    assert read(tmp_path, "dp: {min_ctas: 8}\nep: {min_ctas: 64}\ncp: {min_ctas: 2, max_ctas: 4}") == {
        "dp": {"min_ctas": 8, "max_ctas": 32},
        "ep": {"min_ctas": 64, "max_ctas": 64},
        "cp": {"min_ctas": 2, "max_ctas": 4},
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dq: {max_ctas: 8}", "dq: no such group; the groups are cp, decoder_pp, dp, "),
        ("dp: {ctas: 8}", "dp: ctas: no such setting; choose from min_ctas, max_ctas, "),
        ("dp: {max_ctas: many}", "dp: max_ctas many: expected a whole number of at least 1"),
        ("dp: {max_ctas: true}", "dp: max_ctas True: expected a whole number"),
        ("dp: {cga_cluster_size: 9}", "cga_cluster_size 9: expected a whole number from 0 to 8"),
        ("dp: {min_ctas: 8, max_ctas: 4}", "dp: min_ctas 8 is above max_ctas"),
        ("dp: 8", "dp: expected settings, such as {max_ctas: 8}"),
        ("- dp", "expected groups and their settings"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError) as failure:
        read(tmp_path, text)
    assert str(failure.value).startswith("--nccl-communicator-config-path ") and complaint in str(failure.value)


def test_a_missing_file() -> None:
    with pytest.raises(UserError, match=r"--nccl-communicator-config-path /none: No such file"):
        read_communicator_settings("/none", GROUPS_WITH_SETTINGS)
