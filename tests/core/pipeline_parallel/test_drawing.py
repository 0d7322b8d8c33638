"""Pictures of timelines: text to the column, and the boxes of an SVG."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from megatron.core.pipeline_parallel.drawing import as_svg, as_text, summary
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, Timeline, simulate
from megatron.core.pipeline_parallel.stages import Pipeline

SCHEDULE = Schedule("1f1b", Pipeline(2), 2)
SVG = "{http://www.w3.org/2000/svg}"


def test_text_has_a_line_for_each_rank_with_time_to_the_right() -> None:
    """Forwards last 1, backwards 2; three columns per unit of time hold the shortest label and a gap."""
    assert as_text(simulate(SCHEDULE)) == [
        "0 |F0 F1       B0===    B1===",
        "1 |   F0 B0=== F1 B1===",
    ]


def test_text_of_nothing_is_empty_lines() -> None:
    assert as_text(Timeline(((), ()), Pipeline(2))) == ["", ""]


def test_summary_says_length_bubble_and_peaks() -> None:
    assert summary(SCHEDULE, simulate(SCHEDULE)) == [
        "1f1b: 2 ranks, 2 micro-batches",
        "length 9, bubble 33.3% of all ranks' time",
        "peak activations by rank, in micro-batches through all chunks of a rank: 2 1",
    ]
    forward = Schedule("interleaved", Pipeline(2, 2), 4, forward_only=True)
    head, *rest = summary(forward, simulate(forward))
    assert head == "interleaved: 2 ranks of 2 chunks, 4 micro-batches" and len(rest) == 1


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE,
        Schedule("zb-v", Pipeline(2, 2, v_shaped=True), 3),
        Schedule("interleaved", Pipeline(2, 2), 4),
    ],
)
def test_svg_has_a_box_for_each_computation_at_its_time(schedule: Schedule) -> None:
    timeline = simulate(schedule, Costs(1.0, 1.5, 0.5))
    picture = ElementTree.fromstring(as_svg(schedule, timeline, width=1000))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    spans = [span for row in timeline.spans for span in row]
    assert len(boxes) == len(spans)
    scale = (1000 - 80) / timeline.length
    for box, span in zip(boxes, spans, strict=True):
        title = box.find(f"{SVG}title")
        assert title is not None and title.text == f"{span.action}: {span.start:g} to {span.stop:g}"
        assert float(box.attrib["x"]) == pytest.approx(70 + span.start * scale, abs=0.01)
        assert float(box.attrib["width"]) == pytest.approx((span.stop - span.start) * scale, abs=0.01)
        assert re.fullmatch(r"hsl\(\d+ \d+% \d+%\)", box.attrib["fill"])
    colours = {box.attrib["fill"] for box in boxes}
    assert len(colours) == len({(span.action.kind, span.action.chunk) for span in spans})
