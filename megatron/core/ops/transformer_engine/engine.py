"""Finds Transformer Engine, and translates our fp8 settings to its recipes."""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.recipes import Fp8Settings

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Engine:
    """Transformer Engine's public modules."""

    pytorch: Any
    """transformer_engine.pytorch"""
    recipes: Any
    """transformer_engine.common.recipe"""
    version: str
    device_types: tuple[str, ...] = ("cuda",)
    """Kinds of devices on which Transformer Engine computes."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    """Types for which Transformer Engine is used. It would multiply float32 matrices in TF32."""

    def takes(self, inputs: Tensor, weight: Tensor) -> bool:
        """Whether it is used for these inputs of a layer with this weight."""
        same = inputs.dtype is weight.dtype
        return same and inputs.dtype in self.dtypes and inputs.device.type in self.device_types


def find_engine() -> Engine | str:
    """Returns Transformer Engine, or why it is not used: no GPU, not installed, or its import fails."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if importlib.util.find_spec("transformer_engine") is None:
        return "it is not installed"
    return _import_engine()


@functools.cache
def _import_engine() -> Engine | str:
    try:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:  # a library may be missing
        return f"it cannot be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    if not hasattr(pytorch, "autocast"):
        return f"its release {_version()} is too old: it has no `autocast`; 2.20 has"
    return Engine(pytorch, recipes, _version())


def _version() -> str:
    module = importlib.import_module("transformer_engine")
    return str(getattr(module, "__version__", "of an unknown version"))


def uses_engine(config: "TransformerConfig") -> bool:
    """Returns whether Transformer Engine would compute the layers of a config that asks for it, on this machine."""
    return not isinstance(find_engine(), str) and why_layers_stay_ours(config) is None


def unused_line(reason: str) -> str:
    """Returns the line for the log that says why Transformer Engine, which was asked for, is not used."""
    return (
        f"--transformer-impl transformer_engine: Transformer Engine is not used: {reason}; our own layers compute the "
        "same function, with other kernels and fp8 recipes"
    )


def why_layers_stay_ours(config: "TransformerConfig") -> str | None:
    """Returns why our own layers compute although `config.transformer_impl` asks for Transformer Engine's: its layers
    lack a feature that other flags ask for. None if they lack nothing."""
    if config.fp8 is not None and config.fp8_recipe == "delayed" and _recomputes_products(config):
        return (
            "with --fp8-recipe delayed its layers cannot be recomputed, since they would be quantised with other "
            "scales (tensorwise and blockwise work, and delayed with --recompute-modules "
            f"{' '.join(sorted(_WITHOUT_PRODUCTS))})"
        )
    if config.enable_cuda_graph or config.external_cuda_graph or config.cuda_graph_impl != "none":
        return f"its layers are not captured in CUDA graphs (--cuda-graph-impl {config.cuda_graph_impl})"
    if config.fp4 is not None:
        return f"--fp4-format {config.fp4} is not computed with its layers"
    if config.fp8 is not None:
        return _why_no_recipe(config.fp8_recipe, config.fp8_margin, config.fp8_wgrad)
    return None


_WITHOUT_PRODUCTS = {"core_attn", "layernorm", "mlp_act", "moe_act"}
"""Values of `recompute_modules` that recompute no linear layer."""


def _recomputes_products(config: "TransformerConfig") -> bool:
    selected = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    return bool(config.recompute_granularity == "full" or config.moe_layer_recompute or selected - _WITHOUT_PRODUCTS)


def _why_no_recipe(recipe: str | None, margin: int, wgrad: bool) -> str | None:
    """Returns why Transformer Engine has no recipe for these fp8 settings; None if it has one."""
    if recipe not in ("tensorwise", "delayed", "blockwise"):
        return f"it has no --fp8-recipe {recipe}, only tensorwise, delayed and blockwise"
    if margin and recipe != "delayed":
        return f"its recipe {recipe} does not take --fp8-margin {margin}"
    if not wgrad:
        return "its recipes compute weight gradients in fp8 also with --disable-fp8-wgrad"
    return None


def _missing_support(engine: Engine, settings: Fp8Settings) -> str | None:
    kind = "is_fp8_block_scaling_available" if settings.recipe == "blockwise" else "is_fp8_available"
    works, reason = getattr(engine.pytorch, kind)(return_reason=True)
    return None if works else f"--fp8-recipe {settings.recipe}: {reason}"


def fp8_rows(engine: Engine, recipe: Any) -> int:
    """Returns the number that must divide the number of rows in a recipe's products; 1 without a recipe."""
    if recipe is None:
        return 1
    return 128 if isinstance(recipe, engine.recipes.Float8BlockScaling) else 16


def recipe_of(engine: Engine, settings: Fp8Settings | None) -> object:
    """Returns the recipe for fp8 settings; equal settings give the same object. None: no fp8.

    Scales of delayed scaling are not reduced over ranks: each rank's products use its own, which need not be equal.

    Raises UserError for settings that no recipe has.
    """
    if settings is None:
        return None
    problem = _why_no_recipe(settings.recipe, settings.margin, settings.wgrad) or _missing_support(engine, settings)
    if problem is not None:
        raise UserError(f"--transformer-impl transformer_engine: {problem}; use --transformer-impl auto")
    hybrid = settings.formats.inputs is not settings.formats.gradients
    history = (settings.margin, settings.history_len, settings.amax_algo) if settings.recipe == "delayed" else ()
    return _recipe(engine, settings.recipe, "HYBRID" if hybrid else "E4M3", *history)


@functools.cache
def _recipe(
    engine: Engine, name: str, form: str, margin: int = 0, history_len: int = 1, algo: str = "most_recent"
) -> object:
    recipes, fp8_format = engine.recipes, getattr(engine.recipes.Format, form)
    if name == "tensorwise":
        return recipes.Float8CurrentScaling(fp8_format=fp8_format)
    if name == "blockwise":
        return recipes.Float8BlockScaling(fp8_format=fp8_format)
    return recipes.DelayedScaling(
        margin=margin,
        fp8_format=fp8_format,
        amax_history_len=history_len,
        amax_compute_algo=algo,
        reduce_amax=False,
    )


_surrounding: list[object] = []
"""Recipes of the forward passes that are running, the innermost last."""
_awaits_first = False
"""True until the first product of the running forward pass is computed."""


@contextlib.contextmanager
def quantized_forward(engine: Engine, recipe: Any) -> Iterator[None]:
    """Returns a context in which modules of Transformer Engine multiply in fp8 by a recipe; None: in the type of their
    inputs. Delayed scaling updates its scales when the outermost context ends, so one context must contain a model's
    whole forward."""
    current = _surrounding[-1] if _surrounding else None
    if recipe is current:
        yield
        return
    global _awaits_first
    with engine.pytorch.autocast(enabled=recipe is not None, recipe=recipe):
        _awaits_first = _awaits_first or not _surrounding
        _surrounding.append(recipe)
        try:
            yield
        finally:
            _surrounding.pop()


def updates_gradient_scales(engine: Engine, recipe: Any) -> bool:
    """Returns whether the backward of the next product updates the scales of all gradients. With delayed scaling this
    is the first product in the model's forward that has a backward."""
    global _awaits_first
    if not isinstance(recipe, engine.recipes.DelayedScaling):
        return False
    is_first = _awaits_first or not _surrounding
    _awaits_first = False
    return is_first
