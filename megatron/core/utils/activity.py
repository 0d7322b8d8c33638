"""The progress of this process's communication. A watch uses it to find the rank for which others wait.

`megatron.core.communication.collectives` counts every collective and message here, and notes which one a thread waits
for. Ranks of a group call its collectives in one order, so the numbers of two ranks can be compared: a rank with a
lower number has not joined the collectives that follow.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple


@dataclass
class Channel:
    """The collectives of one group, or the messages from one rank to another, that this process has started."""

    name: str
    """Name of the group or pair, equal on all ranks that take part."""
    ranks: tuple[int, ...]
    """Global ranks that take part; of a message, (sender, receiver)."""
    number: int = 0
    """Calls so far."""
    operation: str = ""
    """The last call."""


class Call(NamedTuple):
    """One call of a collective on this rank."""

    channel: Channel
    number: int
    """Number of the call in its channel, from 1."""
    operation: str


class Activity:
    """Counts calls by channel. Costs less than a microsecond per call."""

    def __init__(self) -> None:
        self.total = 0
        """Calls so far, in all channels."""
        self.channels: dict[str | tuple[int, int], Channel] = {}
        self.waits: dict[int, Call] = {}
        """The call that a thread waits for, by the thread's number. After an error the call stays."""

    def forget(self) -> None:
        """Discards all calls. Called for a new run in this process, because its groups may reuse names of earlier
        groups."""
        self.channels.clear()
        self.waits.clear()

    def begin(self, operation: str, key: str | tuple[int, int], ranks: Callable[[], tuple[int, ...]]) -> Call:
        """Counts a call. `key` is the name of the group; of a message, (sender, receiver)."""
        channel = self.channels.get(key)
        if channel is None:
            name = key if isinstance(key, str) else f"{key[0]}>{key[1]}"
            channel = self.channels[key] = Channel(name, ranks())
        channel.number += 1
        channel.operation = operation
        self.total += 1
        return Call(channel, channel.number, operation)

    def waiting(self, call: Call) -> "_Waiting":
        """Returns a context in which this thread waits for the call."""
        return _Waiting(self.waits, call)


class _Waiting:
    """Notes the call while its context is open, and keeps it after an error."""

    def __init__(self, waits: dict[int, Call], call: Call) -> None:
        self._waits, self._call = waits, call

    def __enter__(self) -> None:
        self._waits[threading.get_ident()] = self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._waits.pop(threading.get_ident(), None)


activity = Activity()
"""The activity of this process."""
