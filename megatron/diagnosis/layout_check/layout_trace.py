"""Records what one rank of a run computes: initial weights, outputs of modules, gradients, norms, weights, with their
places.

A value has a place that no layout changes: for an element of a weight or gradient its index in the canonical tensor,
for a hidden state the index of its token in the global batch. So the values of ranks can be compared with one process
element by element, without gathering.
"""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.initializers import Constant
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.dropout.dropout import dropout_tokens
from megatron.core.parameters import ParameterInfo, canonical_index, canonical_names, info_of
from megatron.core.tokens import Tokens
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import process_environment
from megatron.training.launch.signals import SignalWatch
from megatron.training.loop import train_step
from megatron.training.providers import Providers
from megatron.training.setup.set_up import set_up
from megatron.training.trainer import Trainer

INITIAL, FORWARD, GRADIENT, NORM, WEIGHT = "initial weight", "forward", "gradient", "gradient norm", "weight"
"""Kinds of trace, in the order in which a run makes them."""

LOSS = "loss of each token"

PARTS = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")
"""Modules of a layer whose results are compared, beside the layer's own."""


@dataclass
class LayoutTrace:
    """The values of one rank: by kind and name, places (int64 [n]) and values ([n] or [n, width])."""

    found: dict[tuple[str, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, kind: str, name: str, places: Tensor, values: Tensor) -> None:
        """Adds values. Of a place that was added before, the first value is kept."""
        places, values = places.detach().cpu(), values.detach().cpu().clone()  # what is live will change
        if (kind, name) in self.found:
            known, before = self.found[kind, name]
            fresh = ~torch.isin(places, known)
            places, values = torch.cat([known, places[fresh]]), torch.cat([before, values[fresh]])
        self.found[kind, name] = places, values

    def save(self, path: Path) -> None:
        """Writes the trace as a safetensors file."""
        tensors: dict[str, Tensor] = {}
        for number, ((kind, name), (places, values)) in enumerate(self.found.items()):
            tensors[f"{number:06d}|{kind}|{name}|places"] = places.clone()  # several may share them
            tensors[f"{number:06d}|{kind}|{name}|values"] = values.contiguous()
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path) -> "LayoutTrace":
        """Reads a trace that `save` wrote."""
        trace, tensors = cls(), load_file(path)
        for key in sorted(tensors):
            number, kind, name, what = key.split("|")
            if what == "places":
                trace.found[kind, name] = tensors[key], tensors[f"{number}|{kind}|{name}|values"]
        return trace


def record_layout_trace(
    config: PretrainConfig, providers: Providers, steps: int, *, watched: int = 0, perturb: bool = True
) -> LayoutTrace:
    """Trains this process's rank for a few steps and returns its trace. Outputs of modules and gradients are those of
    step `watched` (from 0).

    With `perturb`, norm weights and biases, which start as ones and zeros, get other values, so that a value that is
    lost or added twice shows.
    """
    if perturb:
        build_model = providers.build_model
        providers = dataclasses.replace(providers, build_model=lambda *place: _perturbed(build_model(*place)))
    with SignalWatch([]) as signals, process_environment(config, publication=providers.publication) as environment:
        trainer = set_up(config, providers, environment, signals, time.monotonic())
        try:
            trace = _train_and_record(trainer, steps, watched)
            trainer.close()
        except BaseException as error:
            trainer.close_after_failure(error)
            raise
    return trace


@torch.no_grad()
def _perturbed(model: nn.Module) -> nn.Module:
    for _, parameter in canonical_names(model):
        info = info_of(parameter)
        if isinstance(info.init, Constant):
            index = canonical_index(info, 0, info.box.numel, parameter.device)
            parameter.view(-1)[: info.box.numel] += torch.sin(index + 1.0) / 4
    return model


def _train_and_record(trainer: Trainer, steps: int, watched: int) -> LayoutTrace:
    trace = LayoutTrace()
    _add_weights(trace, INITIAL, trainer)
    recorders: list[_ModuleRecorder] = []
    take_step = trainer.optimizer.step_on_device

    def after_backward(*arguments: Any) -> object:
        if recorders:
            _add_chunks(trace, GRADIENT, (chunk for model in trainer.model for chunk in model.gradient_chunks()))
            for recorder in recorders:
                recorder.stop()
            recorders.clear()
        return take_step(*arguments)

    trainer.optimizer.step_on_device = after_backward  # type: ignore[assignment, method-assign]
    trainer.log.start(trainer.state.iteration)
    for step in range(steps):
        if step == watched:
            recorders += [_ModuleRecorder(trace, chunk.module, trainer) for chunk in trainer.model]
        result = train_step(trainer)
        norm = result.update.grad_norm
        if norm is not None:
            trace.add(NORM, f"of step {step + 1}", torch.zeros(1, dtype=torch.int64), norm.reshape(1))
        trainer.record_step(result)
    _add_weights(trace, WEIGHT, trainer)
    return trace


def _add_weights(trace: LayoutTrace, kind: str, trainer: Trainer) -> None:
    for model in trainer.model:
        model.start_param_sync(force_sync=True)
        _add_chunks(trace, kind, model.weight_chunks())


def _add_chunks(trace: LayoutTrace, kind: str, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        begin, end = chunk.range
        info = ParameterInfo(chunk.global_shape, chunk.box, Constant(0.0))
        trace.add(kind, chunk.name, canonical_index(info, begin, end - begin), chunk.values())


class _ModuleRecorder:
    """Records the outputs of one model chunk's modules in one step, by token.

    Other models than a GPTModel that is called with `tokens=Tokens(...)` are not recorded: which tokens their modules
    see is not known.
    """

    def __init__(self, trace: LayoutTrace, chunk: nn.Module, trainer: Trainer) -> None:
        self.trace, self.groups = trace, trainer.environment.groups
        self._places: Tensor | None = None
        """Places of the tokens of the current micro-batch on this context parallel rank."""
        model: Any = chunk.module if hasattr(chunk, "module") else chunk
        self._handles = []
        if isinstance(model, GPTModel):
            self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            for name, module in self._modules(model):
                self._handles.append(module.register_forward_hook(self._taker(name)))

    def _modules(self, model: Any) -> Iterable[tuple[str, nn.Module]]:
        if model.pre_process:  # a later stage with layers of multi-token prediction embeds the tokens ahead only
            yield "embedding", model.embedding
        for layer in model.decoder.layers:
            prefix = f"decoder.layers.{layer.canonical_index}"
            for part in PARTS:
                yield f"{prefix}.{part}", getattr(layer, part)
            yield prefix, layer
        if model.decoder.final_layernorm is not None:
            yield "decoder.final_layernorm", model.decoder.final_layernorm
        if model.post_process:
            yield LOSS, model.output_layer

    def _begin(self, model: nn.Module, inputs: Any, keywords: dict[str, object]) -> None:
        tokens = keywords.get("tokens")
        self._places = dropout_tokens(tokens, torch.device("cpu")).index if isinstance(tokens, Tokens) else None

    def _taker(self, name: str) -> Any:
        def take(module: nn.Module, inputs: Any, output: Any) -> None:
            places = self._places
            if places is None:
                return
            result = output[0] if isinstance(output, tuple) else output
            rows = result.reshape(-1, 1) if name == LOSS else result.flatten(0, -2)  # [t, width]
            if rows.shape[0] != places.numel():  # under sequence parallelism, this rank's slice of the tokens
                places = places.chunk(self.groups.size("tp"))[self.groups.rank("tp")]
            self.trace.add(FORWARD, name, places, rows)

        return take

    def stop(self) -> None:
        """Removes the hooks, after the step."""
        for handle in self._handles:
            handle.remove()
