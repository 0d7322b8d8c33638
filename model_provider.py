"""The model provider of scripts that are copies of Megatron-LM's pretrain_gpt.py, which import this module by its name.

Only such scripts use it; in our own scripts a model provider is a function of `Providers`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.global_vars import get_args


def model_provider(
    model_builder: Callable[..., nn.Module],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> nn.Module:
    """Returns the result of `model_builder`, such as `gpt_builders.gpt_builder`, for the run's arguments and a
    (virtual) pipeline stage."""
    given: dict[str, Any] = {"config": config, "pg_collection": pg_collection}
    given = {name: value for name, value in given.items() if value is not None}  # builders of release 0.15 take none
    return model_builder(get_args(), pre_process, post_process, vp_stage, **given)
