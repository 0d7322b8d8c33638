"""The entry scripts by model family, for tools that read checkpoints of all families."""

import sys

if __name__ == "__main__":
    sys.exit("This file is a part of another program; run: python tools/generate.py --load CHECKPOINTS")

from torch import nn

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.conversion.model import BuildModel
from megatron.training.config.recorded_flags import words_of_spec
from megatron.training.config.retired import Occurrence
from megatron.training.providers import Context, Providers, Stage

PROVIDERS: dict[str, Providers] = {
    name: Providers(script.build_model, script.build_datasets, script.build_forward_step)
    for name, script in (("gpt", pretrain_gpt), ("bert", pretrain_bert), ("t5", pretrain_t5))
}
"""Providers of each entry script, by model family."""

BUILDERS: dict[str, BuildModel] = {name: providers.build_model for name, providers in PROVIDERS.items()}
"""Model provider of each entry script, by the model family in its checkpoints."""


def words_given_again(config: object) -> list[str]:
    """Returns the flags that a tool takes besides those of a checkpoint: the tokenizer's new place, and the layers. The
    config has the fields vocab_file, merge_file, tokenizer_model and spec."""
    places = {name: getattr(config, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
    given = [Occurrence(f"--{name.replace('_', '-')}", (place,)) for name, place in places.items() if place is not None]
    return [*(word for one in given for word in one.as_words()), *words_of_spec(vars(config)["spec"])]


def build_model(context: Context, stage: Stage) -> nn.Module:
    """Builds the part of a model that a stage holds, with the entry script of the model's family. Without a family in
    the checkpoint, as in one of your own script, it builds a GPT."""
    return BUILDERS[context.config.model.model_family or "gpt"](context, stage)
