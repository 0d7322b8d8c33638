"""Scripts in the form of releases 0.18 and 0.19: settings first, then the run."""

import argparse
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.runs import TINY, Outcome, remembered, train

from megatron.core.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.facades import argument_utils
from megatron.facades.argument_utils import (
    GPTModelConfig,
    PretrainConfigContainer,
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training import get_args, pretrain
from megatron.training.arguments import parse_and_validate_args

FLAGS = "--mock-data --train-iters 2 --fp64 --position-embedding-type rope --untie-embeddings-and-output-weights"
HYBRID = TINY.replace("--num-layers 2 ", "--hybrid-layer-pattern *-*- ")


def datasets(counts: Any) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_tokenizer

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split=args.split,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=get_tokenizer(),
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()


def forward_step(iterator: Any, model: Any) -> Any:
    batch = next(iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total, count = (losses.view(-1) * mask.view(-1)).sum(), mask.sum().int()
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def parsed(flags: str, base: str = TINY, **keywords: Any) -> Any:
    with mock.patch.object(sys, "argv", ["script.py", *f"{base} {flags}".split()]):
        return parse_and_validate_args(**keywords)


def run(settings: PretrainConfigContainer, **keywords: Any) -> Outcome:
    outcome = Outcome()
    with remembered(outcome, lambda trainer: None):
        pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step, **keywords)
    return outcome


def test_a_script_without_model_provider_trains_what_ours_does() -> None:
    args = parsed(FLAGS)
    found = run(pretrain_cfg_container_from_args(args, model_cfg=gpt_config_from_args(args)))
    assert found.losses == train(FLAGS).losses and len(found.losses) == 2


def test_a_hybrid_model_is_built_from_its_settings() -> None:
    args = parsed(FLAGS, HYBRID, args_defaults={"is_hybrid_model": True})
    found = run(pretrain_cfg_container_from_args(args, hybrid_config_from_args(args)))
    assert found.losses == train(FLAGS, base=HYBRID).losses and len(found.losses) == 2


def test_builders_of_a_script_build_the_same_model() -> None:
    from hybrid_builders import hybrid_builder
    from model_provider import model_provider

    args = parsed(FLAGS, HYBRID)
    found = run(pretrain_cfg_container_from_args(args), model_provider=partial(model_provider, hybrid_builder))
    assert found.losses == train(FLAGS, base=HYBRID).losses


def test_settings_have_their_parts_under_both_names() -> None:
    def more(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine", type=int, default=3)
        return parser

    args = parsed(f"{FLAGS} --mine 4", extra_args_provider=more)
    settings = pretrain_cfg_container_from_args(args)
    assert (
        args.mine == 4
        and settings.train is settings.config.training
        and settings.optimizer is settings.config.optimizer
    )
    assert settings.scheduler is settings.config.schedule and settings.logger is settings.config.logging
    with pytest.raises(AttributeError, match="have no 'nothing'"):
        _ = settings.nothing


def test_what_is_missing_or_not_supported_is_refused() -> None:
    with pytest.raises(UserError, match=r"parse_and_validate_args\(\) does"):
        pretrain_cfg_container_from_args(argparse.Namespace())
    args = parsed(FLAGS)
    settings = pretrain_cfg_container_from_args(args)
    with pytest.raises(UserError, match="give pretrain_cfg_container_from_args a model_cfg"):
        run(settings)
    for name, value in {
        "store": 1,
        "p2p_communicator": 1,
        "pg_collection": 1,
        "skip_model_parallel_init": True,
    }.items():
        with pytest.raises(UserError, match=rf"pretrain\({name}=...\): not yet"):
            run(settings, **{name: value})
    hooked = GPTModelConfig(transformer=settings.config.transformer, vocab_size=8, pre_wrap_hooks=[print])
    with pytest.raises(UserError, match="pre_wrap_hooks"):
        hooked.build_model(None)


def test_names_have_their_homes() -> None:
    from megatron.training.argument_utils import gpt_config_from_args as moved  # type: ignore
    from megatron.training.config.container import PretrainConfigContainer as container  # type: ignore
    from megatron.training.models.gpt import GPTModelConfig as settings  # type: ignore

    assert (moved, container, settings) == (gpt_config_from_args, PretrainConfigContainer, GPTModelConfig)
    assert parse_and_validate_args is argument_utils.parse_and_validate_args
