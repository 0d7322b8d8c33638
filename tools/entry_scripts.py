"""The entry scripts by model family, for tools that work with the checkpoints of all of them."""

from torch import nn

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.training.conversion.model import BuildModel
from megatron.training.providers import Context, Stage

BUILDERS: dict[str, BuildModel] = {
    "gpt": pretrain_gpt.build_model,
    "bert": pretrain_bert.build_model,
    "t5": pretrain_t5.build_model,
}
"""Model provider of each entry script, by the model family that its checkpoints name."""


def build_model(context: Context, stage: Stage) -> nn.Module:
    """Builds the part of a model that a stage holds, with the entry script of the model's family. A checkpoint that
    names none, such as one of a script of your own, has a GPT."""
    return BUILDERS[context.config.model.model_family or "gpt"](context, stage)
