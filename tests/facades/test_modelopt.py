"""ModelOpt's names: what every script calls works, the rest is refused when it is used."""

import argparse

import pytest

from megatron.core.exceptions import UserError
from megatron.facades import modelopt


def test_scripts_may_ask_for_its_flags() -> None:
    from megatron.post_training.arguments import add_modelopt_args, modelopt_args_enabled  # type: ignore

    parser = argparse.ArgumentParser()
    assert add_modelopt_args is modelopt.add_modelopt_args and add_modelopt_args(parser) is parser
    assert parser.parse_args([]) == argparse.Namespace() and not modelopt_args_enabled(argparse.Namespace())


def test_its_models_and_losses_are_refused_with_what_to_do() -> None:
    from megatron.post_training.loss_func import loss_func  # type: ignore
    from megatron.post_training.model_builder import modelopt_gpt_hybrid_builder  # type: ignore

    for name in (loss_func, modelopt_gpt_hybrid_builder):
        with pytest.raises(UserError, match=r"tools/checkpoint/convert.py exports"):
            name(None)
