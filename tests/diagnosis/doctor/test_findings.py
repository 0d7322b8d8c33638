"""Sections travel between ranks as JSON."""

import json

from megatron.diagnosis.doctor.findings import Fact, Finding, Section


def test_a_section_comes_back_as_it_was() -> None:
    section = Section("storage", unseen=["GPUs"])
    section.add("free space", 7)
    section.add("TMPDIR", "/tmp", "warning")
    section.warn("doubtful")
    section.fault("wrong")
    assert Section.from_json(json.loads(json.dumps(section.as_json()))) == section
    assert section.facts == [Fact("free space", "7"), Fact("TMPDIR", "/tmp", "warning")]
    assert section.findings == [Finding("warning", "doubtful"), Finding("fault", "wrong")]
