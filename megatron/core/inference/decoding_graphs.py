"""The decoding step as CUDA graphs: one launch instead of a thousand, and no Python of the model.

A graph has a fixed number of rows and of pages. A step runs the graph of the next larger size: copies of the first row
fill up the rows, so that they write nothing new, and page 0 fills up the pages. A size runs eagerly the first time,
which also compiles and tunes its kernels, and is captured the second time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.core.inference.device_copies import to_device
from megatron.core.inference.layout_forward import LayoutForward
from megatron.core.inference.paged_context import PagedInferenceContext, RowPart, row_numbers
from megatron.core.utils.graph_capture import CapturedGraph, GraphRecorder

_LEAST_PAGES = 8
"""Pages of the smallest graph, so that short texts do not need many sizes."""


@dataclass
class _Size:
    """The step for one number of rows and of pages."""

    numbers: Tensor
    """The rows of the step (`row_numbers`), at a fixed address."""
    graph: CapturedGraph[Tensor] | None = None


class DecodingGraphs:
    """Computes one token of each row by graphs, for a model on a single rank.

    A model that waits for the device, such as one whose experts have no fixed capacity, cannot be captured. The first
    failed capture is told to `warn`, and from then on `logits_of` returns None.
    """

    def __init__(
        self,
        forward: LayoutForward,
        context: PagedInferenceContext,
        recorder: GraphRecorder,
        warn: Callable[[str], None],
    ) -> None:
        self._forward, self._context, self._recorder, self._warn = forward, context, recorder, warn
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._works = not forward.masks_padding  # repeated rows would count in the capacity of experts

    def logits_of(self, rows: Sequence[RowPart]) -> Tensor | None:
        """Returns the logits [b, V] after these rows, each with one token; None: run them eagerly. The next call
        overwrites the logits."""
        if not self._works:
            return None
        context = self._context
        longest = max(row.start for row in rows) + 1
        most = -(-context.max_sequence_length // context.page_size)
        pages = _size_for(-(-longest // context.page_size), min(_LEAST_PAGES, most), most)
        count = _size_for(len(rows), 1, context.num_slots)
        filled = [*rows, *[rows[0]] * (count - len(rows))]
        numbers = to_device(row_numbers(filled, 1, pages), self._forward.device)
        size = self._sizes.get((count, pages))
        if size is None:
            size = self._sizes[count, pages] = _Size(numbers)
            logits = self._recorder.warm_up(lambda: self._run(numbers))
        else:
            size.numbers.copy_(numbers)
            logits = self._replay(size)
        return logits[: len(rows), -1]

    def _replay(self, size: _Size) -> Tensor:
        if size.graph is None:
            try:
                size.graph = self._recorder.capture(lambda: self._run(size.numbers))
            except RuntimeError as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                self._warn(f"no CUDA graphs of decoding steps, which is slower: {reason}")
                self._works = False
                self._sizes.clear()
                return self._run(size.numbers)
        size.graph.replay()
        return size.graph.outputs

    def _run(self, numbers: Tensor) -> Tensor:
        tokens, positions = self._context.begin_decoding(numbers)
        return self._forward(tokens, positions, self._context)


def _size_for(count: int, least: int, most: int) -> int:
    """Returns `least` times the smallest power of two that has room for `count`, but `most` at most."""
    size = least
    while size < count:
        size *= 2
    return min(size, most)
