"""The implementation of each operation that a layer uses.

A backend is a frozen record of records, one for each folder of operations. A layer calls `choose_backend` once, when it
is built; its forward only calls the functions of a record. An operation that has a kernel for one kind of device only
is a `ByDevice`, so a model can be built on one device and moved to another.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.attention.flash3 import find_flash3
from megatron.core.ops.attention.kernels import with_flash3
from megatron.core.ops.attention.operations import AttentionOps
from megatron.core.ops.dropout.operations import DropoutOps
from megatron.core.ops.fp8.block_recipes import is_emulated
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped_linear import Fp8GroupedLinear
from megatron.core.ops.fp8.linear import Fp8Linear
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.recipes import Fp8Kernels, Fp8Settings, LinearSplit
from megatron.core.ops.moe.grouped_linear import grouped_linear
from megatron.core.ops.moe.operations import ExpertOps
from megatron.core.ops.operations import LossOps, MatrixOps, NormOps, RecurrenceOps, every_norm
from megatron.core.ops.records import Ops
from megatron.core.ops.transformer_engine.attention import with_engine_attention
from megatron.core.ops.transformer_engine.engine import (
    Engine,
    find_engine,
    recipe_of,
    unused_line,
    why_layers_stay_ours,
)
from megatron.core.ops.transformer_engine.linear import make_grouped_linear, make_linear
from megatron.core.ops.transformer_engine.norm import EngineNorms
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.warn import warn_on_first_rank


@dataclass(frozen=True)
class Backend:
    """Records of operations, in the order in which the log names them. The defaults are plain torch on any device, with
    numba for random masks on a CPU."""

    name: str
    matrices: MatrixOps = field(default_factory=MatrixOps)
    norms: NormOps = field(default_factory=NormOps)
    attention: AttentionOps = field(default_factory=AttentionOps)
    dropout: DropoutOps = field(default_factory=DropoutOps)
    recurrence: RecurrenceOps = field(default_factory=RecurrenceOps)
    losses: LossOps = field(default_factory=LossOps)
    experts: ExpertOps = field(default_factory=ExpertOps)
    fp8_kernels: Fp8Kernels = field(default_factory=Fp8Kernels)
    fp8: Fp8Settings | None = None
    """Settings with which the linear layers of `make_linear` multiply in fp8; None: not in fp8."""
    engine: Engine | None = None
    """Transformer Engine, if it computes grouped experts and linear layers that own their weight; else None."""
    tokens_group: Group = None
    """The ranks that divide the tokens of a micro-batch before they reach a layer (context parallelism)."""

    def records(self) -> dict[str, Ops]:
        """Returns the records of operations by their names."""
        return {name: record for name, record in vars(self).items() if isinstance(record, Ops)}

    def with_operations(self, **changed: Mapping[str, Any]) -> "Backend":
        """Returns the backend with other operations: for the names of records, functions by the names of operations."""
        own = self.records()
        made: dict[str, Any] = {name: dataclasses.replace(own[name], **changes) for name, changes in changed.items()}
        return dataclasses.replace(self, **made)

    def make_linear(self, split: LinearSplit, weight: Tensor | None) -> Callable[..., Tensor]:
        """Returns the function that computes one linear layer: `linear`, or with fp8 an object that keeps the layer's
        scales and its quantised weight. `weight` [out, in] gives sizes and device; None: the layer does not own a
        weight."""
        if self.engine is not None and weight is not None and weight.dtype in self.engine.dtypes:
            made: Callable[..., Tensor] = make_linear(self.engine, self.fp8, weight)
            return made
        if self.fp8 is None or weight is None:
            return self.matrices.linear
        split = dataclasses.replace(split, tokens=(*split.tokens, self.tokens_group))
        return Fp8Linear(self.fp8, split, weight, self.matrices.sum_rows)

    def make_grouped_linear(
        self, split: LinearSplit, weight: Tensor, micro_batches: MicroBatches
    ) -> Callable[..., Tensor]:
        """Returns the function that computes one linear layer of all experts of a rank, as `make_linear` does for other
        layers."""
        if self.engine is not None and weight.dtype in self.engine.dtypes:
            made: Callable[..., Tensor] = make_grouped_linear(self.engine, self.fp8, weight)
            return made
        if self.fp8 is None:
            return self.experts.grouped_linear
        return Fp8GroupedLinear(self.fp8, split, weight, micro_batches)

    def describe(self, device_type: str) -> str:
        """Returns one line for the log: the backend, and its operations that are not plain torch on a kind of
        device."""
        if self.engine is not None:
            fp8 = "" if self.fp8 is None else f" in fp8 by its recipe {recipe_of(self.engine, self.fp8)}"
            if self.fp8 is not None and self.fp8.recipe == "delayed":
                fp8 += " (its history is not in checkpoints and starts anew)"
            return f"backend {self.name} {self.engine.version}: its linear layers{fp8}, {_OF_ENGINE}"
        subjects = list(dict.fromkeys(name for ops in self.records().values() for name in ops.subjects(device_type)))
        if len(subjects) > 3:
            return f"backend {self.name}: its own kernels for {', '.join(subjects)}; plain torch for the rest"
        return f"backend {self.name}: plain torch" + (f" except {', '.join(subjects)}" if subjects else "")


_OF_ENGINE = (
    "norms, attention and grouped experts; ours: head and loss, rotary positions, activations, "
    "dropout, routing, experts one by one, attention under context parallelism, the optimizer (one kernel for all)"
)
"""The log's text about the operations that Transformer Engine computes, and those that our code computes."""


LOCAL = Backend("local")


@functools.cache
def triton_backend() -> Backend | None:
    """Returns the backend with our own GPU kernels, or None if Triton cannot be imported."""
    try:
        from megatron.core.ops.fp8.kernels_triton import fp8_kernels_triton

        own: dict[str, Any] = {name: record.by_triton() for name, record in LOCAL.records().items()}
    except ImportError:
        return None
    return dataclasses.replace(LOCAL, name="triton", fp8_kernels=fp8_kernels_triton(), **own)


def engine_backend(engine: Engine) -> Backend:
    """Returns the backend whose linear layers, norms, attention and grouped experts are Transformer Engine's. Other
    operations are those of the Triton backend on a GPU."""
    base = (triton_backend() if torch.cuda.is_available() else None) or LOCAL
    norms = EngineNorms(engine, base.norms.layer_norm, base.norms.rms_norm)
    own = base.with_operations(
        norms={**every_norm(norms.layer_norm, norms.rms_norm), "noting": {}},
        attention={"kernels": with_engine_attention(engine, base.attention.kernels), "normed_rope": None},
        # Transformer Engine needs the numbers of rows on the host, like the plain loop.
        experts={"grouped_linear": grouped_linear, "noting": {}},
    )
    return dataclasses.replace(own, name="transformer_engine", engine=engine)


_engine_backend = functools.cache(engine_backend)


def choose_backend(config: ModelParallelConfig) -> Backend:
    """Returns the backend of `config.transformer_impl`. transformer_engine: Transformer Engine's backend, if it can be
    used and `why_layers_stay_ours` returns no reason against it; otherwise a warning says why it is not used. local, or
    no GPU or no Triton: LOCAL. Otherwise: the Triton backend. With `attention_backend` flash, FlashAttention-3 comes
    first where it is installed.

    Raises UserError if the config asks for Triton and it cannot be imported."""
    if not isinstance(config, TransformerConfig):
        return _fastest_backend()
    backend = _asked_backend(config)
    flash3 = find_flash3() if config.attention_backend is AttnBackend.flash else None
    if flash3 is not None:
        return backend.with_operations(attention={"kernels": with_flash3(backend.attention.kernels, flash3)})
    return backend


def _asked_backend(config: TransformerConfig) -> Backend:
    asked = config.transformer_impl
    if asked == "transformer_engine":
        engine = find_engine()
        reason = engine if isinstance(engine, str) else why_layers_stay_ours(config)
        if isinstance(engine, Engine) and reason is None:
            return _engine_backend(engine)
        warn_on_first_rank(unused_line(reason or ""))
    if asked == "triton":
        backend = triton_backend()
        if backend is None:
            raise UserError(
                "--transformer-impl triton: Triton cannot be imported; install it, or use --transformer-impl auto, "
                "which then computes with plain torch"
            )
        return backend
    return LOCAL if asked == "local" else _fastest_backend()


def _fastest_backend() -> Backend:
    return (triton_backend() if torch.cuda.is_available() else None) or LOCAL


def backend_of_layer(
    backend: Backend, config: ModelParallelConfig, layer_number: int, groups: ProcessGroupCollection
) -> Backend:
    """Returns the backend of a transformer layer, counted from 1 over the whole model: with linear layers in fp8 if the
    config asks for them in this layer."""
    settings = fp8_settings(config, layer_number, backend.fp8_kernels)
    if settings is None:
        return backend
    tokens_group = groups.cp if groups.size("cp") > 1 else None
    if settings.recipe == "tensorwise":
        backend = backend.with_operations(**{name: record.noting for name, record in backend.records().items()})
    return dataclasses.replace(backend, fp8=settings, tokens_group=tokens_group)


def fp8_settings(config: ModelParallelConfig, layer_number: int, kernels: Fp8Kernels) -> Fp8Settings | None:
    """Returns the fp8 settings of a layer, or those of fp4; None if its products are in neither."""
    if not isinstance(config, TransformerConfig) or (config.fp8 is None and config.fp4 is None):
        return None
    if config.first_last_layers_bf16:
        last = config.num_layers - config.num_layers_at_end_in_bf16
        if layer_number <= config.num_layers_at_start_in_bf16 or layer_number > last:
            return None
    if config.fp4 is not None:
        assert config.fp4_recipe is not None
        return Fp8Settings(config.fp4_recipe, FORMATS["e4m3"], keeps_weights=config.fp8_weight_cache)
    assert config.fp8 is not None and config.fp8_recipe is not None
    return Fp8Settings(
        recipe=config.fp8_recipe,
        formats=FORMATS[config.fp8],
        margin=config.fp8_margin,
        history_len=config.fp8_amax_history_len,
        amax_algo=config.fp8_amax_compute_algo,
        wgrad=config.fp8_wgrad,
        keeps_weights=config.fp8_weight_cache,
        kernels=Fp8Kernels() if is_emulated(config.fp8_recipe) else kernels,
    )
