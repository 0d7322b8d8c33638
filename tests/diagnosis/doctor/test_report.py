"""The report ends with the verdict, whose number is the exit code."""

import pytest

from megatron.diagnosis.doctor.comparison import RankReport
from megatron.diagnosis.doctor.examination import Examination
from megatron.diagnosis.doctor.findings import Finding, Section
from megatron.diagnosis.doctor.report import report_lines

SECTION = Section("software", unseen=["NCCL: torch sees no GPU"])
SECTION.add("torch", "2.11")


@pytest.mark.parametrize(("levels", "code"), [((), 0), (("warning",), 1), (("warning", "fault"), 2), (("fault",), 2)])
def test_the_worst_finding_decides(levels: tuple[str, ...], code: int) -> None:
    findings = tuple(Finding(level, f"a {level}") for level in levels)  # type: ignore[arg-type]
    found = Examination((RankReport("a", (SECTION,)),) * 2, findings, ("copies 3 GB/s",))
    lines = list(report_lines(found))
    assert found.exit_code == code and lines[-1].startswith(f"verdict    {code}: ")
    assert lines[:3] == ["software   torch 2.11", "not seen   NCCL: torch sees no GPU", lines[2]]
    assert "2 ranks on 1 host were compared" in lines[2] and lines[3] == "measured   copies 3 GB/s"
    assert [line for line in lines if line.startswith(("warning", "fault"))] == [f"{one}: a {one}" for one in levels]
