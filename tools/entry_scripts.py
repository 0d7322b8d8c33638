"""The entry scripts by model family, for tools that read checkpoints of all families."""

import sys

if __name__ == "__main__":
    sys.exit("This file is a part of another program; run: python tools/generate.py --load CHECKPOINTS")

from torch import nn

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.conversion.model import BuildModel
from megatron.training.providers import Context, Providers, Stage

PROVIDERS: dict[str, Providers] = {
    name: Providers(script.build_model, script.build_datasets, script.build_forward_step)
    for name, script in (("gpt", pretrain_gpt), ("bert", pretrain_bert), ("t5", pretrain_t5))
}
"""Providers of each entry script, by model family."""

BUILDERS: dict[str, BuildModel] = {name: providers.build_model for name, providers in PROVIDERS.items()}
"""Model provider of each entry script, by the model family in its checkpoints."""


def build_model(context: Context, stage: Stage) -> nn.Module:
    """Builds the part of a model that a stage holds, with the entry script of the model's family. Without a family in
    the checkpoint, as in one of your own script, it builds a GPT."""
    return BUILDERS[context.config.model.model_family or "gpt"](context, stage)
