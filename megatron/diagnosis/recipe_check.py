"""Checks a recipe: builds its model at full size without memory, counts parameters, and trains a tiny one."""

import contextlib
import io
import math
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.conversion.model import BuildModel, canonical_shapes
from megatron.core.exceptions import UserError
from megatron.diagnosis.layout_check.shrink_layout import LayoutSizes
from megatron.diagnosis.layout_check.shrink_model import ShrunkFlags
from megatron.training.arguments import configure
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recipes.catalogue import Recipe
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.config.training import SOURCES_OF_FLAGS
from megatron.training.inspection.run_description import command_line_of
from megatron.training.loop import run_pretraining
from megatron.training.providers import Providers

TOLERANCE = 0.005
"""Largest accepted difference from the published number of parameters, relative. Papers round."""
STEPS = 2
"""Steps that the tiny model trains."""


@dataclass(frozen=True)
class RecipeCheck:
    """The result of a check."""

    recipe: Recipe
    counted: int
    """Parameters of the model that the flags build, without layers of multi-token prediction."""

    @property
    def expected(self) -> int:
        """The published number of parameters; the one that the recipe states if none was looked up."""
        return self.recipe.published or self.recipe.parameters

    @property
    def error(self) -> float:
        """Difference from the expected number, relative."""
        return self.counted / self.expected - 1

    @property
    def is_right(self) -> bool:
        """Whether the number of parameters is the one that the recipe states, and as published."""
        return self.counted == self.recipe.parameters and math.fabs(self.error) <= TOLERANCE


def config_of_recipe(recipe: Recipe) -> PretrainConfig:
    """Returns the config of a dry run in one process that gives --recipe and no other flag of a model.

    Raises ConfigurationError if the flags of the recipe do not fit together."""
    words = ["--recipe", recipe.name, "--dry-run", "--micro-batch-size", "1"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(recipe.vocabulary - 1)]
    return configure(words, None, {"model_family": recipe.model_family}, launch_environment=_ALONE)


def count_parameters(recipe: Recipe, build_model: BuildModel) -> RecipeCheck:
    """Builds the model of a recipe on the meta device, at full size, and counts its parameters."""
    shapes = canonical_shapes(config_of_recipe(recipe), build_model, recipe.vocabulary)
    return RecipeCheck(recipe, sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith("mtp.")))


def train_tiny(recipe: Recipe, providers: Providers) -> list[float]:
    """Trains a model of the recipe's kinds of layers in tiny sizes, in this process, on made-up data. Returns the loss
    of each step. Raises UserError if the run ends early or a loss is not finite."""
    with tempfile.TemporaryDirectory() as folder:
        words = list(tiny_words(config_of_recipe(recipe), Path(folder)))
        config = configure(words, None, {"model_family": recipe.model_family}, launch_environment=_ALONE)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            decision = run_pretraining(config, providers, time.monotonic())
    losses = [float(found) for found in re.findall(r"iteration +\d+/.*? lm loss: (\S+)", output.getvalue())]
    if decision is not None or len(losses) != STEPS or not all(map(math.isfinite, losses)):
        raise UserError(f"{recipe.name}: the tiny model did not train {STEPS} steps:\n{output.getvalue()}")
    return losses


def tiny_words(config: PretrainConfig, folder: Path) -> Iterator[str]:
    """Yields the command line of a tiny run: the recipe's kinds of layers, optimizer and schedule. Writes files that
    the run needs into `folder`."""
    shape = ShrunkFlags(config, LayoutSizes(), STEPS, [])
    sizes = [*shape.model_words(), "--log-interval", "1", "--lr-decay-style", config.schedule.lr_decay_style]
    if config.model.model_family == "t5":
        sizes += ["--encoder-num-layers", "2", "--decoder-seq-length", "8", "--vocab-extra-ids", "10"]
    if config.model.model_family in ("bert", "t5"):  # their samples need special tokens
        words = folder / "vocab.txt"
        words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(95))]))
        at = sizes.index("--tokenizer-type")
        sizes[at : at + 4] = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(words)]
    replaced = {name for name, flag in flag_table().items() if set(flag.spellings) & set(sizes)} | shape.left_out
    yield from command_line_of(config, flag_table().keys() - replaced - _NOT_TINY)
    yield from sizes


_ALONE = LaunchEnvironment(1, has_cuda=False)
_NOT_TINY = frozenset((*SOURCES_OF_FLAGS, "dry_run", "kv_channels", "encoder_seq_length", "vocab_size"))
"""Fields of the full run that the tiny one does not have."""
