"""`MegatronParallel`: the model chunks of a rank, and the steps of micro-batches that run through them."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.loss import MegatronLossReduction, Report
from megatron.facades.nemo.lightning.module_steps import Kind, LightningIterator, StepFunctions, functions_of
from megatron.facades.script_providers import reporting_tensors
from megatron.training.providers import ForwardStep, LossFunction


@dataclass
class MegatronStep:
    """A step: micro-batches of one global batch."""

    pipeline: "MegatronParallel"
    data: Foreign
    forward_step_func: ForwardStep
    forward_only: bool
    micro_batch_size: int | None = None
    seq_length: int | None = None
    num_microbatches: int | None = None
    step_i: int | None = None
    """Number of steps before this one."""
    decoder_seq_length: int | None = None

    @property
    def model(self) -> Sequence[nn.Module]:
        """The chunks of this rank."""
        return self.pipeline.networks

    @property
    def pl_module(self) -> nn.Module:
        """The module of the first chunk."""
        return self.pipeline.module

    @property
    def trainer(self) -> Foreign:
        """The trainer; None outside a run."""
        return getattr(self.pl_module, "trainer", None)


class CallbackMethods:
    """The events of a step, for callbacks. A callback of any class may define some of these methods."""

    def on_megatron_step_start(self, step: MegatronStep) -> None:
        """A step begins."""

    def on_megatron_microbatches_start(self, step: MegatronStep) -> None:
        """The first micro-batch of the step comes next."""

    def on_megatron_microbatch_start(self, step: MegatronStep, batch: Foreign, forward_callback: Foreign) -> None:
        """A micro-batch goes through a chunk next. `forward_callback` is its loss reduction."""

    def on_megatron_microbatch_end(
        self, step: MegatronStep, batch: Foreign, forward_callback: Foreign, output: Foreign
    ) -> None:
        """A micro-batch went through a chunk."""

    def on_megatron_microbatches_end(self, step: MegatronStep, microbatch_outputs: Sequence[Report]) -> None:
        """All micro-batches are done. Their reports are empty on ranks without the loss."""

    def on_megatron_reduce_microbatches_start(self, step: MegatronStep, microbatch_outputs: Sequence[Report]) -> None:
        """The reports are reduced next, on ranks with the loss."""

    def on_megatron_reduce_microbatches_end(
        self, step: MegatronStep, microbatch_outputs: Sequence[Report], loss_reduction: Foreign, reduced: Tensor
    ) -> None:
        """The reports are reduced."""

    def on_megatron_step_end(
        self, step: MegatronStep, microbatch_outputs: Sequence[Report], reduced: Tensor | None = None
    ) -> None:
        """The step is done."""


def call(listener: object, name: str, *args: object, **kwargs: object) -> Foreign:
    """Calls the method `name` of an object, if it has one. Returns its result."""
    method = getattr(listener, name, None)
    return method(*args, **kwargs) if callable(method) else None


class CallbackConnector:
    """Calls the methods of callbacks by the name of an event."""

    def __init__(self, callbacks: Iterable[object] | None = None) -> None:
        self.callbacks: list[object] = list(callbacks or ())

    def add(self, *callbacks: object) -> "CallbackConnector":
        """Adds callbacks; returns this object."""
        self.callbacks += callbacks
        return self

    def event(self, name: str, *args: object, **kwargs: object) -> None:
        """Calls the method `name` of each callback that has one."""
        for callback in self.callbacks:
            call(callback, name, *args, **kwargs)

    def transform_event(self, name: str, obj: Foreign, **kwargs: object) -> Foreign:
        """Passes an object through the methods `name`, each of which may return another object in its place."""
        for callback in self.callbacks:
            obj = call(callback, name, obj, **kwargs) or obj
        return obj

    def __contains__(self, callback: object) -> bool:
        return any(each is callback for each in self.callbacks)


class MegatronParallel(nn.ModuleList):
    """The model chunks of a rank. `training_step`, `validation_step`, `test_step` and `predict_step` run micro-batches
    through them; in a run its loop does, with the same functions and events.

    Args:
        pipeline: a module, or one for each virtual pipeline stage. If a module keeps its network as `module`, that is
            the chunk.
        callbacks: receive the events of `CallbackMethods`.
        data_step, forward_step, loss_reduction: functions of (iterator), (model, batch) and (model), in place of those
            of the module.

    Raises UserError for other arguments, which the run decides: precision_plugin, ddp_config, fsdp, convert_module_fn.
    """

    def __init__(
        self,
        pipeline: nn.Module | Iterable[nn.Module],
        precision_plugin: object = None,
        callbacks: CallbackConnector | None = None,
        data_step: Callable[[Foreign], Foreign] | None = None,
        forward_step: Callable[[nn.Module, Foreign], Foreign] | None = None,
        loss_reduction: Callable[[nn.Module], Foreign] | None = None,
        vp_size: int | None = None,
        ddp_config: object = None,
        fsdp: object = None,
        cpu: bool = False,
        convert_module_fn: object = None,
    ) -> None:
        refused = {"precision_plugin": precision_plugin, "ddp_config": ddp_config, "fsdp": fsdp}
        for name, value in {**refused, "convert_module_fn": convert_module_fn}.items():
            if value is not None:
                raise UserError(
                    f"MegatronParallel({name}=...): leave it out; give it to nl.Trainer or MegatronStrategy"
                )
        super().__init__([pipeline] if isinstance(pipeline, nn.Module) else pipeline)
        self.callbacks = callbacks or CallbackConnector()
        self.given: dict[str, Foreign] = {
            "data_step": data_step,
            "forward_step": forward_step,
            "loss_reduction": loss_reduction,
        }
        self.step: MegatronStep | None = None
        """The step that runs."""

    @property
    def networks(self) -> list[nn.Module]:
        """The chunks that the schedule runs."""
        return [network_of(module) for module in self]

    @property
    def module(self) -> nn.Module:
        """The first module."""
        return self[0]

    @property
    def pipeline(self) -> nn.Module | list[nn.Module]:
        """The module, or the list of them."""
        return self[0] if len(self) == 1 else [*self]

    def functions(self, kind: Kind, **given: Callable[..., Foreign] | None) -> StepFunctions:
        """Returns the functions of a kind of step: those of a call, of this object, or of the module."""
        names = ("data_step", "forward_step", "loss_reduction")
        data, forward, loss = (given.get(name) or self.given[name] for name in names)
        if data is not None and forward is not None and loss is not None:
            return StepFunctions(data, lambda module, network, batch: forward(network, batch), loss)
        own = functions_of(self.module, kind)
        return StepFunctions(
            data or own.data_step,
            own.forward_step if forward is None else (lambda module, network, batch: forward(network, batch)),
            loss or own.loss_reduction,
        )

    def micro_batch_step(self, functions: StepFunctions, module_of: Callable[[nn.Module], nn.Module]) -> ForwardStep:
        """Returns the forward step of a schedule: one micro-batch through the chunk that it is given. `module_of`
        returns the module of a chunk."""

        def forward_step(data: Foreign, network: nn.Module) -> tuple[Foreign, LossFunction]:
            module = module_of(network)
            iterator = data if data is None or isinstance(data, LightningIterator) else LightningIterator(data)
            batch = functions.data_step(iterator)
            reduction = functions.loss_reduction(module)
            self.callbacks.event(
                "on_megatron_microbatch_start", step=self.step, batch=batch, forward_callback=reduction
            )
            output = functions.forward_step(module, network, batch)
            self.callbacks.event(
                "on_megatron_microbatch_end", step=self.step, batch=batch, forward_callback=reduction, output=output
            )
            return output, loss_function(reduction, batch)

        return reporting_tensors(forward_step)

    def forward(  # type: ignore[override]
        self,
        data: Foreign,
        forward_only: bool = True,
        data_step: Callable[..., Foreign] | None = None,
        forward_step: Callable[..., Foreign] | None = None,
        loss_reduction: Callable[..., Foreign] | None = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
        step_i: int | None = None,
        wrap_forward_step: bool = True,
        kind: Kind = "validation",
    ) -> Tensor:
        """Runs micro-batches through the chunks, backward too unless `forward_only`, and returns the reduced loss; 0 on
        ranks without it. `data` is one micro-batch, a list of them, or an iterator of `num_microbatches`."""
        functions = self.functions(kind, data_step=data_step, forward_step=forward_step, loss_reduction=loss_reduction)
        batches = None if isinstance(data, Iterator) else ([*data] if isinstance(data, list) else [data])
        rows, length = (None, None) if batches is None else _shape_of(batches[0])
        modules = {id(network): module for network, module in zip(self.networks, self, strict=True)}
        run = self.micro_batch_step(functions, lambda network: modules[id(network)])
        step = MegatronStep(
            self,
            data,
            run,
            forward_only,
            micro_batch_size or rows,
            seq_length or length,
            num_microbatches or (1 if batches is None else len(batches)),
            step_i,
        )
        self.begin(step)
        sources = [iter(data) if batches is None else iter(batches) for _ in self]
        reports = get_forward_backward_func(vp_size=len(self))(
            forward_step_func=run,
            data_iterator=[LightningIterator(source) for source in sources],
            model=self.networks,
            num_microbatches=step.num_microbatches,
            seq_length=step.seq_length,
            micro_batch_size=step.micro_batch_size,
            forward_only=forward_only,
        )
        reduced = self.end(reports, functions)
        return torch.zeros(()) if reduced is None else reduced

    def training_step(self, data: Foreign, **how: Foreign) -> Tensor:
        """Runs forward and backward; see `forward`."""
        return self(data, forward_only=False, kind="training", **how)

    def validation_step(self, data: Foreign, **how: Foreign) -> Tensor:
        """Runs forward with the functions of validation; see `forward`."""
        return self(data, kind="validation", **how)

    def test_step(self, data: Foreign, **how: Foreign) -> Tensor:
        """Runs forward with the functions of the test; see `forward`."""
        return self(data, kind="test", **how)

    def predict_step(self, data: Foreign, **how: Foreign) -> Tensor:
        """Runs forward with the functions of prediction; see `forward`."""
        return self(data, kind="predict", **how)

    def begin(self, step: MegatronStep) -> None:
        """Makes a step the current one, and tells its begin."""
        self.step = step
        self.callbacks.event("on_megatron_step_start", step=step)
        self.callbacks.event("on_megatron_microbatches_start", step=step)

    def end(self, reports: Sequence[Report], functions: StepFunctions) -> Tensor | None:
        """Tells the end of the current step. Returns the reduced loss; None on ranks without it."""
        event, step, reduced = self.callbacks.event, self.step, None
        event("on_megatron_microbatches_end", step=step, microbatch_outputs=reports)
        if reports:
            reduction = functions.loss_reduction(self.module)
            event("on_megatron_reduce_microbatches_start", step=step, microbatch_outputs=reports)
            reduced = reduction.reduce(reports)
            event(
                "on_megatron_reduce_microbatches_end",
                step=step,
                microbatch_outputs=reports,
                loss_reduction=reduction,
                reduced=reduced,
            )
        event("on_megatron_step_end", step=step, microbatch_outputs=reports, reduced=reduced)
        self.step = None
        return reduced


def network_of(module: nn.Module) -> nn.Module:
    """Returns the network of a module: its attribute `module`, or the module itself."""
    inner = getattr(module, "module", None)
    return inner if isinstance(inner, nn.Module) else module


def loss_function(reduction: Foreign, batch: Foreign) -> LossFunction:
    """Returns the function that computes the loss of a micro-batch from its output."""
    if isinstance(reduction, MegatronLossReduction):
        return functools.partial(reduction.forward, batch)
    if hasattr(reduction, "setup"):  # a reduction of another class, which has a batch as state
        reduction.setup(batch)
        return functools.partial(reduction.forward, batch)
    return functools.partial(reduction, batch)


def _shape_of(batch: Foreign) -> tuple[int | None, int | None]:
    """Returns rows and length of the first tensor of a batch that has both."""
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 1:
            return value.size(0), value.size(1)
    return None, None
