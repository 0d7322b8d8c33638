"""Adapts Megatron-LM's provider functions, which read `get_args()` themselves, to `Providers`."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.utils.keywords import Keywords
from megatron.training.providers import (
    Context,
    ForwardStep,
    LossFunction,
    NonLossFunctions,
    Providers,
    SampleCounts,
    Stage,
    stages_of_rank,
)


def providers_of_user_script(
    datasets_provider: Callable[..., Sequence[Any]],
    model_provider: Callable[..., nn.Module],
    forward_step_func: ForwardStep,
    optimizer_provider: Callable[..., Any] | None = None,
    non_loss: NonLossFunctions | None = None,
) -> Providers:
    """Adapts Megatron-LM's provider functions, which read `get_args()` themselves, to `Providers`.

    A provider gets only the Megatron-LM keywords that its signature accepts, so scripts of several releases work.
    """

    def build_forward_step(context: Context) -> ForwardStep:
        groups = context.environment.groups
        size, leads = groups.size("cp"), not any(groups.rank(axis) for axis in ("tp", "cp", "dp"))
        return reporting_tensors(forward_step_func, size if leads else 1)

    return Providers(
        model_builder(model_provider),
        datasets_builder(datasets_provider),
        build_forward_step,
        None if optimizer_provider is None else optimizer_builder(optimizer_provider),
        non_loss=non_loss,
        use_torch_distributed=True,
    )


def reporting_tensors(forward_step: ForwardStep, context_parallel_size: int = 1) -> ForwardStep:
    """Returns the forward step of a Megatron-LM script with reports as the app takes them: a tensor of one value, or of
    a sum and a count. A script may also report numbers, scalars, and pairs of them.

    With `context_parallel_size` above 1, prints once how a mean loss is scaled, which releases did differently.
    """

    @functools.wraps(forward_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step(*args, **kwargs)
        if loss_func is None:
            return output, None
        return output, functools.partial(_report_tensors, loss_func, context_parallel_size)

    return step


def _report_tensors(loss_func: LossFunction, context_parallel_size: int, output: Tensor, **keywords: Any) -> Any:
    found = loss_func(output, **keywords)
    if keywords.get("non_loss_data"):
        return found
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise UserError(
            f"a loss function returned {type(found).__name__}; it returns (mean loss, report), or (sum of losses, "
            "number of tokens, report)"
        )
    *loss, report = found
    if len(loss) == 1 and context_parallel_size > 1:
        _tell_scaling(context_parallel_size)
    device = loss[0].device
    return (*loss, {name: _report_tensor(name, value, device) for name, value in report.items()})


@functools.cache
def _tell_scaling(size: int) -> None:
    print(
        f"the loss function returns a mean loss, which is multiplied by --context-parallel-size {size} here, as in "
        "Megatron-LM from release 0.14 on; a script of releases 0.5 and 0.6 does so itself and must leave it out",
        flush=True,
    )


def _report_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    parts = value if isinstance(value, tuple | list) else [value]
    tensors = [part if isinstance(part, Tensor) else torch.full((), float(part), device=device) for part in parts]
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors])
    if flat.numel() not in (1, 2):
        raise UserError(f"the report {name!r} of a loss function has {flat.numel()} values; give one, or sum and count")
    return flat


def model_builder(model_provider: Callable[..., nn.Module]) -> Callable[[Context, Stage], nn.Module]:
    """Adapts Megatron-LM's model provider to `Providers.build_model`. The builder raises UserError for a virtual stage
    if the provider has no parameter `vp_stage`."""

    def build_model(context: Context, stage: Stage) -> nn.Module:
        if stage.virtual is not None and "vp_stage" not in Keywords.of(model_provider):
            raise UserError(
                f"the model provider {getattr(model_provider, '__name__', '')} has no parameter vp_stage, which "
                "distinguishes virtual pipeline stages: add it, or leave out the flags of virtual stages"
            )
        offered = {
            "pre_process": stage.pre_process,
            "post_process": stage.post_process,
            "vp_stage": stage.virtual,
            "config": context.config.transformer,
            "pg_collection": context.environment.groups,
        }
        if context.config.transformer.num_encoder_layers:
            offered |= {"add_encoder": stage.add_encoder, "add_decoder": stage.add_decoder}
        return model_provider(**Keywords.of(model_provider).chosen_from(offered))

    return build_model


def datasets_builder(
    datasets_provider: Callable[..., Sequence[Any]],
) -> Callable[[Context, SampleCounts], Sequence[Any]]:
    """Adapts Megatron-LM's datasets provider to `Providers.build_datasets`."""

    def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
        stages = stages_of_rank(context.config, context.environment.groups.rank("pp"))
        return datasets_of_provider(datasets_provider, counts, [stage.virtual for stage in stages])

    return build_datasets


def optimizer_builder(optimizer_provider: Callable[..., Any]) -> Callable[[Context, Sequence[nn.Module]], Any]:
    """Adapts an optimizer provider, `optimizer_provider(model_chunks)`, to `Providers.build_optimizer`."""

    def build_optimizer(context: Context, model: Sequence[nn.Module]) -> Any:
        offered = {"config": context.config.optimizer, "pg_collection": context.environment.groups}
        return optimizer_provider(list(model), **Keywords.of(optimizer_provider).chosen_from(offered))

    return build_optimizer


def datasets_of_provider(
    provider: Callable[..., Sequence[Any]], counts: SampleCounts, chunks: Sequence[int | None]
) -> Sequence[Any]:
    """Returns the datasets that Megatron-LM's datasets provider builds on this rank; None for a dataset that it builds
    on other ranks only.

    It is called on every rank, even if it says (`is_distributed`) that the first tensor parallel rank is enough,
    because each rank reads its own data. With virtual stages it is called once for each chunk, as Megatron-LM does; all
    chunks of a rank then read the same datasets, those of the first chunk that got any. A provider without the
    parameter `vp_stage`, as in release 0.14, is called once: it tells pipeline ranks apart, not their chunks.
    """
    asked = [counts.train, counts.valid, counts.test]
    found: list[Any] = [None] * len(asked)
    keywords = Keywords.of(provider)
    for chunk in chunks if "vp_stage" in keywords else [None]:
        given = provider(asked, **keywords.chosen_from({"vp_stage": chunk}))
        found = [one if one is not None else other for one, other in zip(found, given, strict=True)]
    return found


def refuse(function: str, asked: Mapping[str, bool]) -> None:
    """Raises UserError for the first argument of a function of Megatron-LM that is given and not supported yet."""
    for name, value in asked.items():
        if value:
            raise UserError(f"{function}({name}=...): not yet")


def warn_unused(function: str, given: Mapping[str, Any]) -> None:
    """Prints, on the first rank, which arguments of a function of Megatron-LM have no effect here."""
    for name, value in given.items():
        if value is not None and os.environ.get("RANK", "0") == "0":
            print(
                f"{function}({name}=...) has no effect: the layout of the stages decides which ranks hold an embedding",
                flush=True,
            )
