"""How entry scripts of a release work together with the trainer, as far as the table of facts does not tell it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conventions:
    """What differs between releases."""

    loss: str
    """What GPT's loss function returns: "mean": a mean loss; "summed": a sum of losses and a number of tokens, and a
    report that is already summed over ranks; "local": the same of this rank alone."""
    scales_by_context: bool = True
    """Whether this function multiplies its loss by the number of context parallel ranks."""
    virtual_models: bool = False
    """Whether the model providers of GPT and BERT take `vp_stage`, and GPT's forward step a third parameter."""
    virtual_datasets: bool = False
    """Whether the datasets providers of GPT and BERT take `vp_stage`."""
    builder: bool = False
    """Whether GPT's model provider is a function of a builder, in a file of its own."""
    given_config: bool = False
    """Whether model providers take `config` and `pg_collection`."""


_LOCAL = Conventions("local", scales_by_context=False, virtual_models=True)
CONVENTIONS = {
    **dict.fromkeys(["0.5", "0.6"], Conventions("mean")),
    **dict.fromkeys(["0.7", "0.8", "0.9", "0.11"], Conventions("summed")),
    "0.14": _LOCAL,
    "0.15": Conventions("local", False, True, virtual_datasets=True, builder=True),
    "0.16": Conventions("local", False, True, virtual_datasets=True, builder=True, given_config=True),
}

_REQUIRED = {"train_val_test_num_samples", "data_iterator", "model"}
_TRUE = {"pre_process", "post_process", "add_encoder", "add_decoder"}


def taking(function: Callable[..., Any], *names: str) -> Any:
    """Returns `function` with parameters of these names, by position or by keyword; the trainer asks which there are.
    `function` gets all of them by keyword."""
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if name in _REQUIRED else True if name in _TRUE else None,
        )
        for name in names
    ]
    signature = inspect.Signature(parameters)

    def with_names(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    with_names.__signature__ = signature  # type: ignore[attr-defined]
    return with_names
