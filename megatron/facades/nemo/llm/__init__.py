"""NeMo's collection of language models, as far as pretraining of GPTs needs it."""

from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.loss import MaskedTokenLossReduction as MaskedTokenLossReduction
from megatron.facades.nemo.llm import tokenizer as tokenizer
from megatron.facades.nemo.llm.api import pretrain as pretrain
from megatron.facades.nemo.llm.api import train as train
from megatron.facades.nemo.llm.api import validate as validate
from megatron.facades.nemo.llm.config import OF_RECIPES, config_of_recipe
from megatron.facades.nemo.llm.config import GPTConfig as GPTConfig
from megatron.facades.nemo.llm.config import Llama3Config as Llama3Config
from megatron.facades.nemo.llm.config import LlamaConfig as LlamaConfig
from megatron.facades.nemo.llm.data import MockDataModule as MockDataModule
from megatron.facades.nemo.llm.data import PreTrainingDataModule as PreTrainingDataModule
from megatron.facades.nemo.llm.gpt import GPTModel as GPTModel
from megatron.facades.nemo.llm.gpt import (
    get_batch_on_this_context_parallel_rank as get_batch_on_this_context_parallel_rank,
)
from megatron.facades.nemo.llm.gpt import gpt_data_step as gpt_data_step
from megatron.facades.nemo.llm.gpt import gpt_forward_step as gpt_forward_step
from megatron.facades.nemo.llm.recipes import RECIPES

LlamaModel = MistralModel = MixtralModel = NemotronModel = Qwen2Model = Qwen3Model = Starcoder2Model = GPTModel
"""NeMo's classes of models: the config makes the difference."""


def __getattr__(name: str) -> Foreign:
    """Returns a recipe, or makes a class of sizes when it is first used."""
    if name in RECIPES:
        return RECIPES[name]
    if name not in OF_RECIPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = config_of_recipe(name)
    return found
