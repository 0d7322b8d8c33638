"""Chooses the attention kernel of a layer for every situation: device, training or evaluation, packed rows or not."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from megatron.core.backends import Backend
from megatron.core.ops.attention.blocks_cuda import round_up
from megatron.core.ops.attention.kernels import UNFUSED, AttentionKernel, BlockKernel, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils.warn import warn_on_first_rank

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_HALF = torch.bfloat16
Kernel = TypeVar("Kernel", AttentionKernel, BlockKernel)


@dataclass(frozen=True)
class KernelChoice(Generic[Kernel]):
    """The attention kernel chosen for a situation."""

    kernel: Kernel
    refusals: tuple[tuple[str, str], ...]
    """Names of preferred kernels, each with the reason why it cannot be used."""
    remark: str = ""
    """How the kernel changes the layer's tensors first (padding)."""
    remedies: tuple[str, ...] = ()
    """Changes of flags; each of them alone would let the layer use a preferred kernel."""
    further: tuple[Kernel, ...] = field(default=(), compare=False)
    """Kernels for calls that `kernel` cannot compute, in order of preference."""

    @property
    def names(self) -> set[str]:
        """The names of all kernels that `describe` may name."""
        return {self.kernel.name, *(name for name, _ in self.refusals), *(later.name for later in self.further[:1])}

    def describe(self) -> str:
        """Returns the kernel's name, why no preferred kernel was chosen, and the flags that would change this."""
        why = f", because {' and '.join(map(' '.join, self.refusals))}" if self.refusals else ""
        faster = f" ({' or '.join(self.remedies)} is faster)" if self.remedies else ""
        return f"{self.kernel.name}{self.remark}{why}{faster}"


@dataclass(frozen=True)
class KernelPlan(Generic[Kernel]):
    """The kernel of an attention layer for every situation."""

    choices: Mapping[Situation, KernelChoice[Kernel]]

    def kernel_of(self, situation: Situation, call: AttentionCall, queries: int) -> Kernel:
        """Returns the kernel of a call with so many queries in a row. Short rows, some attention masks and query
        positions need another kernel than the planned one, especially together with packed documents. A warning says so
        if it is the unfused one."""
        planned = self.choices[situation].kernel
        if not isinstance(planned, AttentionKernel) or planned.takes(call, queries):
            return planned
        for kernel in self.choices[situation].further:
            if kernel is not UNFUSED and kernel.takes(call, queries):  # type: ignore[attr-defined]  # all are of one kind
                return kernel
        what = "an attention mask" if call.mask is not None else "a cache of keys"
        packed = call.cu_seqlens is not None
        warn_on_first_rank(
            f"attention: {planned.name} cannot combine {what} with packed documents or chunks, so plain "
            "torch computes them, which is slower; packed documents are kept apart without a mask, too"
            if packed
            else f"attention: {planned.name} cannot compute with {what}, so plain torch does, which is slower"
        )
        return UNFUSED  # type: ignore[return-value]

    def choices_on(self, device_type: str, packed: bool = False) -> list[KernelChoice[Kernel]]:
        """Returns the kernels of training and of evaluation on one kind of device."""
        return [
            next(choice for situation, choice in self.choices.items() if _is(situation, device_type, kind, packed))
            for kind in (True, False)
        ]

    def describe(self, device_type: str, packed: bool = False) -> str:
        """Returns which kernels compute training and evaluation on one kind of device."""
        training, evaluation = self.choices_on(device_type, packed)
        if training == evaluation:
            return training.describe()
        return f"training: {training.describe()}; evaluation: {evaluation.describe()}"


AttentionPlan = KernelPlan[AttentionKernel]


BlockPlan = KernelPlan[BlockKernel]


def _is(situation: Situation, device_type: str, training: bool, packed: bool) -> bool:
    return (situation.device_type, situation.training, situation.packed) == (device_type, training, packed)


def plan_attention(backend: Backend, variant: AttentionVariant, config: "TransformerConfig") -> AttentionPlan:
    """Chooses the kernels of an attention layer by the config's `params_dtype` and `attention_backend`.

    If the kernel of `attention_backend` flash or fused cannot compute a layer, the next one does. On a machine
    with a GPU a warning says so if this concerns training on unpacked rows.
    """
    kernels = backend.attention.kernels[config.attention_backend]
    return _plan([each for each in kernels if variant.selects or not each.for_selected_keys], variant, config)


def plan_attention_blocks(backend: Backend, variant: AttentionVariant, config: "TransformerConfig") -> BlockPlan:
    """Chooses the kernels for rows that are split over ranks; otherwise like `plan_attention`."""
    return _plan(backend.attention.block_kernels[config.attention_backend], variant, config)


def _plan(candidates: Sequence[Kernel], variant: AttentionVariant, config: "TransformerConfig") -> KernelPlan[Kernel]:
    choices = {}
    for device_type, training, packed in itertools.product(("cpu", "cuda"), (True, False), (False, True)):
        situation = Situation(device_type, config.params_dtype, training, packed)
        choices[situation] = _choose_kernel(candidates, variant, situation)
    named = AttnBackend.flash, AttnBackend.fused
    if torch.cuda.is_available() and config.attention_backend in named:
        _tell_other_kernel(candidates, variant, config)
    return KernelPlan(choices)


def _tell_other_kernel(candidates: Sequence[Kernel], variant: AttentionVariant, config: "TransformerConfig") -> None:
    """Warns if the kernel that `attention_backend` names does not compute training on a GPU."""
    asked = [kernel for kernel in candidates if not (isinstance(kernel, AttentionKernel) and kernel.is_preference)]
    choice = _choose_kernel(asked, variant, Situation("cuda", config.params_dtype, True, False))
    if choice.refusals:
        warn_on_first_rank(f"--attention-backend {config.attention_backend.name}: attention uses {choice.describe()}")


def _choose_kernel(
    candidates: Sequence[Kernel], variant: AttentionVariant, situation: Situation
) -> KernelChoice[Kernel]:
    kernel, refusals = _first_usable(candidates, variant, situation)
    # A kernel can be a candidate twice, first for the cases in which it is the fastest. It is then not named as a
    # refused kernel.
    others = tuple(dict.fromkeys((name, reason) for name, reason in refusals if name != kernel.name))
    changes = {
        "--attention-dropout 0": (dataclasses.replace(variant, dropout=0.0), situation),
        "--bf16": (variant, dataclasses.replace(situation, dtype=_HALF)),
    }
    remedies = tuple(
        flag for flag, changed in changes.items() if others and _first_usable(candidates, *changed)[0] is not kernel
    )
    later = candidates[candidates.index(kernel) + 1 :]
    further = tuple(k for k in later if k.serves(situation) and k.refusal(variant, situation) is None)
    return KernelChoice(kernel, others, _remark(kernel, variant) + _short_rows(kernel, further), remedies, further)


def _short_rows(kernel: AttentionKernel | BlockKernel, further: Sequence[AttentionKernel | BlockKernel]) -> str:
    """Returns the log's remark on rows that are too short for a kernel; empty if none is."""
    if not isinstance(kernel, AttentionKernel) or not kernel.least_queries:
        return ""
    return f" (rows of fewer than {kernel.least_queries:,} tokens: {further[0].name})"


def _first_usable(
    candidates: Sequence[Kernel], variant: AttentionVariant, situation: Situation
) -> tuple[Kernel, list[tuple[str, str]]]:
    """Returns the first kernel that can compute a situation, and the names and reasons of the kernels before it."""
    refusals: list[tuple[str, str]] = []
    for kernel in candidates:
        if kernel.serves(situation):
            refusal = kernel.refusal(variant, situation)
            if refusal is None:
                return kernel, refusals
            refusals.append((kernel.name, refusal))
    raise AssertionError("the last candidate computes everything")


def _remark(kernel: AttentionKernel | BlockKernel, variant: AttentionVariant) -> str:
    """Returns the log's remark on heads that are padded with channels of zeros; empty without padding."""
    if variant.widths is None or kernel.fills == "never":
        return ""
    keys, values = variant.widths
    width = round_up(max(keys, values), kernel.width_multiple)
    when = "" if kernel.fills == "always" else f" {kernel.fills}"
    if keys == values:
        return f" (heads of {keys} channels padded to {width})" if width > keys else ""
    narrower = "keys" if keys < values else "values"
    return f" ({narrower} of {min(keys, values)} channels padded to {width}{when})"
