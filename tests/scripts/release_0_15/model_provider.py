"""Imports, reads and calls what model_provider of Megatron-LM 0.15 does."""

import torch
from collections.abc import Callable

import megatron.legacy.model
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.training import get_args, print_rank_0

try:
    from megatron.post_training.model_provider import model_provider as modelopt_gpt_mamba_builder

    has_nvidia_modelopt = True
except ImportError:
    has_nvidia_modelopt = False


def model_provider(
    model_builder: Callable, pre_process=True, post_process=True, vp_stage=None
) -> GPTModel | megatron.legacy.model.GPTModel | MambaModel:
    args = get_args()
    if has_nvidia_modelopt and getattr(args, "modelopt_enabled", False):
        model_builder = modelopt_gpt_mamba_builder
    if args.record_memory_history:
        torch.cuda.memory._record_memory_history(True)
    return model_builder(args, pre_process, post_process, vp_stage)


def count_parameters_in_layer(model, layer_name):
    return sum(parameter.numel() for name, parameter in model.named_parameters() if layer_name in name)
