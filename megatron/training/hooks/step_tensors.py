"""--save-params-interval and similar flags: write tensors of single steps to safetensors files."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.sharding_strategy import replica_ranks
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer import StepUpdate
from megatron.core.parameters import info_of
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.hooks.hook import Hook

Update = Callable[[Tensor], StepUpdate]


class StepTensors(Hook):
    """Writes each kind of tensor in `intervals` after every step that its interval divides. If a weight or gradient is
    sharded, it writes the one-dimensional part that this rank holds, under the name NAME[start:stop] (in elements).
    Raises UserError if a folder cannot be made. If a file cannot be written (a full disk), it prints a warning and
    training continues.
    """

    def __init__(
        self,
        root: Path,
        model: Sequence[DistributedDataParallel],
        groups: ProcessGroupCollection,
        intervals: Mapping[str, int],
    ) -> None:
        self.root, self.model, self.groups, self.intervals = root, model, groups, dict(intervals)
        self._found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._iteration = 0
        self._watched: set[str] = set()
        """Modules whose output gradients are recorded in the current step."""
        self._ends: list[Callable[[], None]] = []
        """Functions that remove the hooks registered by `before_step`."""

    def is_due(self, kind: str) -> bool:
        """Whether the current step writes this kind."""
        return kind in self.intervals and self._iteration % self.intervals[kind] == 0

    def before_step(self, iteration: int) -> None:
        """Registers hooks on modules and routers if the next step writes their tensors."""
        self._iteration = iteration + 1
        self._watched.clear()
        if self.is_due("activations") or self.is_due("dgrads"):
            for chunk in self.model:
                self._ends += [
                    module.register_forward_hook(self._watch(name)).remove for name, module in _modules(chunk)
                ]
        if self.is_due("tokens_per_expert"):
            for router in routers_of(self.model):
                router.observers.append(self._count)
                self._ends.append(partial(router.observers.remove, self._count))

    def _watch(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, inputs: object, outputs: object) -> None:
            output = outputs[0] if isinstance(outputs, tuple) else outputs
            if not isinstance(output, Tensor) or not torch.is_grad_enabled():
                return
            if self.is_due("activations") and name not in self._found["activations"]:
                self._found["activations"][name] = _copy(output)
            if self.is_due("dgrads") and output.requires_grad and name not in self._watched:
                self._watched.add(name)
                output.register_hook(lambda gradient: self._found["dgrads"].setdefault(name, _copy(gradient)))

        return note

    def _count(self, router: TopKRouter, hidden: Tensor | None, logits: Tensor, experts: Tensor, _: Tensor) -> None:
        counts = torch.bincount(experts.flatten(), minlength=router.num_experts)
        name = info_of(router.weight).name.removesuffix(".weight")
        found = self._found["tokens_per_expert"]
        found[name] = found[name] + counts if name in found else counts

    def around(self, update: Update) -> Update:
        """Returns the optimizer's step, wrapped so that it records the main gradients first."""

        def noting(loss_is_finite: Tensor) -> StepUpdate:
            if self.is_due("wgrads"):
                self._found["wgrads"] = dict(self._shards(lambda unit: unit.gradient_shard))
            return update(loss_is_finite)

        return noting

    def after_step(self, iteration: int) -> None:
        """Writes the files of the step that has ended."""
        for end in self._ends:
            end()
        self._ends = []
        if self.is_due("params"):
            self._found["params"] = dict(self._shards(lambda unit: unit.model_shard()))
        for kind, tensors in self._found.items():
            self._write(kind, iteration, tensors)
        self._found.clear()

    def _shards(self, buffer_of: Callable[[Unit], Tensor]) -> Iterator[tuple[str, Tensor]]:
        for unit in (unit for chunk in self.model for unit in chunk.units):
            for part in unit.parameter_slices:
                if replica_ranks(part.info, self.groups, unit.sharding)[0] != self.groups.global_rank:
                    continue
                values = _copy(part.view_in(buffer_of(unit)))
                if part.flat_range is None:
                    yield part.info.name, values.view(part.info.box.shape)
                else:
                    yield f"{part.info.name}[{part.flat_range[0]}:{part.flat_range[1]}]", values

    def _write(self, kind: str, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        path = self.root / kind / folder_name(iteration) / f"rank_{self.groups.global_rank:05d}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--save-{kind.replace('_', '-')}-interval: {path}: {error.strerror}") from None
        try:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)
        except (OSError, SafetensorError) as error:  # a full disk; training does not need the file
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            print(f"WARNING: --save-{kind.replace('_', '-')}-interval: {path} is not written: {error}", flush=True)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def routers_of(model: Sequence[nn.Module]) -> list[TopKRouter]:
    """Returns the routers of these model chunks."""
    return [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]


def _modules(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that have weights of their own, by their canonical names."""
    for module in chunk.modules():
        for parameter in module.parameters(recurse=False):
            yield info_of(parameter).name.rpartition(".")[0], module
            break
