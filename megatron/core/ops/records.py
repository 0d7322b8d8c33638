"""What the records of operations consist of: `Ops`, one subclass in each folder of operations, and `ByDevice`."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self, TypeVar

from torch import Tensor

Record = TypeVar("Record")


@dataclass(frozen=True)
class ByDevice:
    """An operation with one implementation for GPUs and one for other devices. The first tensor argument decides."""

    cpu: Callable[..., Any]
    cuda: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the implementation for the device of the first tensor argument."""
        first = next(argument for argument in args if isinstance(argument, Tensor))
        return self.chosen_for(first)(*args, **kwargs)

    def chosen_for(self, tensor: Tensor) -> Callable[..., Any]:
        """Returns the implementation for the device of a tensor."""
        return self.cuda if tensor.is_cuda else self.cpu


@dataclass(frozen=True)
class Ops(ABC):
    """A record of operations: each field has the signature and meaning of the function of its name in
    `megatron.core.ops`. The defaults of a subclass are its record in plain torch."""

    noting: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Operations of the record, by name, that also note the largest values of their results
    (`fp8.quantize.note_largest`). Layers with tensorwise scaling use them."""

    @classmethod
    @abstractmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs. Raises ImportError without Triton."""

    def with_noting(self, *names: str) -> Self:
        """Returns the record with these operations in `noting` too; their kernels for GPUs take `notes_largest`."""
        own = {name: vars(self)[name] for name in names}
        noting = {
            name: ByDevice(kept.cpu, functools.partial(kept.cuda, notes_largest=True)) for name, kept in own.items()
        }
        return dataclasses.replace(self, noting=noting)

    def subjects(self, device_type: str) -> Iterator[str]:
        """Yields how the log names each operation that is not plain torch on a kind of device."""
        for entry in dataclasses.fields(self):
            function = vars(self)[entry.name]
            if isinstance(function, ByDevice):
                function = function.cpu if device_type == "cpu" else function.cuda
            if "subject" in entry.metadata and function is not entry.metadata["plain"]:
                yield entry.metadata["subject"]


def operation(default: Callable[..., object], subject: str, plain: Callable[..., object] | None = None) -> Any:
    """Returns a field of a record that the log names by its subject where it is not plain torch. `plain`: the version
    in plain torch if the default is another one."""
    return field(default=default, metadata={"subject": subject, "plain": plain or default})


def on_gpus(record: Record, *modules: ModuleType, **others: Callable[..., object]) -> Record:
    """Returns the record with kernels for GPUs; other devices keep its functions. The kernel of a function `x` is
    `x_triton` of one of the modules; `others` are kernels of other names, by field."""
    found = {name: function for module in modules for name, function in vars(module).items()}
    made = {}
    for name, own in vars(record).items():
        cpu, cuda = (own.cpu, own.cuda) if isinstance(own, ByDevice) else (own, own)
        kernel = others.get(name) or found.get(f"{getattr(cuda, '__name__', '')}_triton")
        if kernel is not None:
            made[name] = ByDevice(cpu=cpu, cuda=kernel)
    return dataclasses.replace(record, **made)  # type: ignore[type-var]  # every record is a dataclass
