"""Draws a simulated schedule, as text for a terminal and as SVG."""

from collections.abc import Iterator

from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import TimedAction, Timeline

_FILL = {
    ActionKind.FORWARD: ".",
    ActionKind.BACKWARD: "=",
    ActionKind.INPUT_GRADIENT: "-",
    ActionKind.WEIGHT_GRADIENT: "~",
}

_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradient",
}

_COLOURS = {
    ActionKind.FORWARD: (214, 68),
    ActionKind.BACKWARD: (160, 42),
    ActionKind.INPUT_GRADIENT: (190, 42),
    ActionKind.WEIGHT_GRADIENT: (90, 40),
}
"""Hue and saturation; chunks differ in lightness."""


def summary(schedule: Schedule, timeline: Timeline, unit: str = "") -> list[str]:
    """Returns lines with the length, the bubble and the peak activations of a timeline. `unit` follows a time."""
    pipeline = schedule.pipeline
    chunks = f" of {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    peaks = [timeline.peak_activations(rank) for rank in range(pipeline.pipeline_size)]
    lines = [
        f"{schedule.name}: {pipeline.pipeline_size} ranks{chunks}, {schedule.num_microbatches} micro-batches",
        f"length {timeline.length:g}{unit}, bubble {timeline.bubble:.1%} of all ranks' time",
    ]
    if not schedule.forward_only:
        numbers = " ".join(f"{peak:g}" for peak in peaks)
        lines.append(f"peak activations by rank, in micro-batches through all chunks of a rank: {numbers}")
    return lines


def as_text(timeline: Timeline) -> list[str]:
    """Returns one line for each rank, with time to the right.

    F is forward, B backward, X input gradient, W weight gradient. Each is followed by its micro-batch and, after a
    point, by its chunk if that is not the first.
    """
    spans = [span for row in timeline.spans for span in row if span.stop > span.start]
    if not spans:
        return ["" for _ in timeline.spans]
    # Columns per unit of time: every label fits, with one column to spare.
    scale = max((len(str(span.action)) + 1) / (span.stop - span.start) for span in spans)
    width = len(str(len(timeline.spans) - 1))
    return [f"{rank:>{width}} |{_line(row, scale)}" for rank, row in enumerate(timeline.spans)]


def _line(spans: tuple[TimedAction, ...], scale: float) -> str:
    line = ""
    for span in spans:
        start, stop = round(span.start * scale), round(span.stop * scale)
        label = str(span.action)
        line = line.ljust(start) + label.ljust(stop - start - 1, _FILL[span.action.kind]) + " "
    return line.rstrip()


def as_svg(schedule: Schedule, timeline: Timeline, width: int = 1200, height: int = 26, unit: str = "") -> str:
    """Returns an SVG picture `width` pixels wide: the summary, and below it a row of `height` pixels for each rank."""
    head = summary(schedule, timeline, unit)
    left, top = 70, 24 + 18 * len(head)
    scale = (width - left - 10) / (timeline.length or 1.0)
    bottom = top + height * len(timeline.spans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 40}" width="{width}" '
        f'height="{bottom + 40}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 40}" fill="white"/>',
        *(f'<text x="10" y="{20 + 18 * row}">{line}</text>' for row, line in enumerate(head)),
    ]
    for rank, spans in enumerate(timeline.spans):
        y = top + height * rank
        lines.append(f'<text x="10" y="{y + height * 0.65:.1f}">rank {rank}</text>')
        for span in spans:
            lines += _box(span, left + span.start * scale, y + 2, (span.stop - span.start) * scale, height - 4)
    lines += [*_legend(timeline, left, bottom + 14), "</svg>"]
    return "\n".join(lines) + "\n"


def _box(span: TimedAction, x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_colour(span.action)}" '
        f'stroke="white" stroke-width="0.5"><title>{span.action}: {span.start:g} to {span.stop:g}</title></rect>'
    )
    label = str(span.action.micro_batch)
    if width > 7 * len(label):
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + height * 0.5 + 4:.2f}" text-anchor="middle" fill="white">{label}'
            "</text>"
        )


def _colour(action: Action) -> str:
    hue, saturation = _COLOURS[action.kind]
    return f"hsl({hue} {saturation}% {max(25, 48 - 11 * action.chunk)}%)"


def _legend(timeline: Timeline, x: float, y: float) -> Iterator[str]:
    found = {(span.action.kind, span.action.chunk): span.action for spans in timeline.spans for span in spans}
    for (kind, chunk), action in sorted(found.items(), key=lambda item: (list(_NAMES).index(item[0][0]), item[0][1])):
        name = _NAMES[kind] + (f", chunk {chunk}" if timeline.pipeline.chunks > 1 else "")
        yield f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" fill="{_colour(action)}"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10:.0f}">{name}</text>'
        x += 34 + 6.5 * len(name)
