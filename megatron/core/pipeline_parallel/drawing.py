"""Pictures of a schedule that was played through: for a terminal, and as SVG."""

from collections.abc import Iterator

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Span, Timeline

_FILL = {
    Kind.FORWARD: ".",
    Kind.BACKWARD: "=",
    Kind.INPUT_GRADIENT: "-",
    Kind.WEIGHT_GRADIENT: "~",
    Kind.PAIR: ":",
}

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}

_COLOURS = {
    Kind.FORWARD: (214, 68),
    Kind.BACKWARD: (160, 42),
    Kind.INPUT_GRADIENT: (190, 42),
    Kind.WEIGHT_GRADIENT: (90, 40),
}
"""Hue and saturation; chunks differ in lightness."""


def summary(schedule: Schedule, timeline: Timeline) -> list[str]:
    """What the picture shows, in numbers."""
    pipeline = schedule.pipeline
    chunks = f" of {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    peaks = [timeline.peak_activations(rank) for rank in range(pipeline.pipeline_size)]
    lines = [
        f"{schedule.name}: {pipeline.pipeline_size} ranks{chunks}, {schedule.num_microbatches} micro-batches",
        f"length {timeline.length:g}, bubble {timeline.bubble:.1%} of all ranks' time",
    ]
    if not schedule.forward_only:
        held = " ".join(f"{peak:g}" for peak in peaks)
        lines.append(f"peak activations by rank, in micro-batches of a rank's whole share: {held}")
    return lines


def as_text(timeline: Timeline) -> list[str]:
    """A line for each rank, time to the right. F forward, B backward, X input gradient, W weight gradient, each with
    its micro-batch and, after a point, its chunk if it is not the first. A bar between a forward and a backward: they
    take turns."""
    spans = [span for of_rank in timeline.spans for span in of_rank if span.stop > span.start]
    if not spans:
        return ["" for _ in timeline.spans]
    # So many columns a unit of time that every label has room, and one to spare.
    scale = max((len(str(span.action)) + 1) / (span.stop - span.start) for span in spans)
    width = len(str(len(timeline.spans) - 1))
    return [f"{rank:>{width}} |{_line(of_rank, scale)}" for rank, of_rank in enumerate(timeline.spans)]


def _line(spans: tuple[Span, ...], scale: float) -> str:
    line = ""
    for span in spans:
        start, stop = round(span.start * scale), round(span.stop * scale)
        label = str(span.action)
        line = line.ljust(start) + label.ljust(stop - start - 1, _FILL[span.action.kind]) + " "
    return line.rstrip()


def as_svg(schedule: Schedule, timeline: Timeline, width: int = 1200, height: int = 26) -> str:
    """A picture of `width` pixels with a row of `height` pixels for each rank, and the summary above."""
    head = summary(schedule, timeline)
    left, top = 70, 24 + 18 * len(head)
    scale = (width - left - 10) / (timeline.length or 1.0)
    bottom = top + height * len(timeline.spans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 40}" width="{width}" '
        f'height="{bottom + 40}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 40}" fill="white"/>',
        *(f'<text x="10" y="{20 + 18 * place}">{line}</text>' for place, line in enumerate(head)),
    ]
    for rank, spans in enumerate(timeline.spans):
        y = top + height * rank
        lines.append(f'<text x="10" y="{y + height * 0.65:.1f}">rank {rank}</text>')
        for span in spans:
            parts = span.action.parts
            tall = (height - 4) / len(parts)  # a pair's forward stands above its backward
            for place, part in enumerate(parts):
                top_of_part = y + 2 + place * tall
                lines += _box(
                    span, part, left + span.start * scale, top_of_part, (span.stop - span.start) * scale, tall
                )
    lines += [*_legend(timeline, left, bottom + 14), "</svg>"]
    return "\n".join(lines) + "\n"


def _box(span: Span, part: Action, x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_colour(part)}" '
        f'stroke="white" stroke-width="0.5"><title>{span.action}: {span.start:g} to {span.stop:g}</title></rect>'
    )
    label = str(part.micro_batch)
    if width > 7 * len(label):
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + height * 0.5 + 4:.2f}" text-anchor="middle" fill="white">{label}'
            "</text>"
        )


def _colour(action: Action) -> str:
    hue, saturation = _COLOURS[action.kind]
    return f"hsl({hue} {saturation}% {max(25, 48 - 11 * action.chunk)}%)"


def _legend(timeline: Timeline, x: float, y: float) -> Iterator[str]:
    parts = (part for spans in timeline.spans for span in spans for part in span.action.parts)
    found = {(part.kind, part.chunk): part for part in parts}
    for (kind, chunk), action in sorted(found.items(), key=lambda item: (list(_NAMES).index(item[0][0]), item[0][1])):
        name = _NAMES[kind] + (f", chunk {chunk}" if timeline.pipeline.chunks > 1 else "")
        yield f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" fill="{_colour(action)}"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10:.0f}">{name}</text>'
        x += 34 + 6.5 * len(name)
