"""The doctor's report: facts of the first rank, what could not be seen, findings, and the verdict."""

import textwrap
from collections.abc import Iterator

from megatron.diagnosis.doctor.examination import Examination

_WIDTH = 120
_VERDICTS = ("all is well", "warnings: a run may be slow, or stop later", "faults: a run would fail or be wrong")


def report_lines(found: Examination) -> Iterator[str]:
    """Yields the report. The last line has the verdict, whose number is the exit code."""
    first = found.reports[0]
    for section in first.sections:
        facts = "; ".join(f"{fact.name} {fact.text}" for fact in section.facts)
        yield from textwrap.wrap(f"{section.title:<10} {facts}", _WIDTH, subsequent_indent=" " * 11)
    for unseen in dict.fromkeys(text for section in first.sections for text in section.unseen):
        yield f"not seen   {unseen}"
    hosts = dict.fromkeys(report.host for report in found.reports)
    if len(found.reports) > 1:
        yield f"ranks      {len(found.reports)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)} were compared"
    for line in found.measured:
        yield f"measured   {line}"
    for level in ("warning", "fault"):
        yield from (f"{level}: {finding.text}" for finding in found.findings if finding.level == level)
    yield f"verdict    {found.exit_code}: {_VERDICTS[found.exit_code]}"
