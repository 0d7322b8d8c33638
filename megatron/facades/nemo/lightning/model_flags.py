"""The settings of a run that a module gives: sizes of its network, tokenizer and optimizer."""

from torch import nn

from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades.nemo.lightning.arguments import Foreign, shown
from megatron.facades.nemo.lightning.bases import defines
from megatron.facades.nemo.lightning.flags import Flags
from megatron.training.config.model import ACTIVATIONS

_OF_STRATEGY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_OF_PRECISION = ("params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype", "enable_autocast")
_DERIVED = (
    "num_query_groups",
    "gated_linear_unit",
    "activation_func",
    "bias_activation_fusion",
    "add_qkv_bias",
    "init_method",
    "output_layer_init_method",
    "embedding_init_method",
    "use_te_rng_tracker",
    "deallocate_pipeline_outputs",
    "batch_p2p_comm",
    "tp_only_amax_red",
    "gradient_accumulation_fusion",
    "heterogeneous_block_specs",
    "is_hybrid_model",
)
LEFT_OUT = (*_OF_STRATEGY, *_OF_PRECISION, *_DERIVED)
"""Fields of a TransformerConfig that strategy and precision plugin decide, or that follow from others."""


def give_model(flags: Flags, module: nn.Module, datamodule: Foreign, stage: str, trainer: Foreign) -> None:
    """Adds the settings of a module's `config`, `tokenizer` and `optim`."""
    owner = type(module).__name__
    config: Foreign = getattr(module, "config", None)
    if isinstance(config, type):
        config = None
    if hasattr(config, "give_flags"):
        config.give_flags(flags)
    elif isinstance(config, TransformerConfig):
        give_transformer(flags, config)
    else:
        advice = "give the module a config: a TransformerConfig of megatron.core, or llm.GPTConfig"
        flags.refuse(f"{owner}.config is {shown(config)}", advice)
    _give_lengths(flags, config)
    _give_tokenizer(flags, module, datamodule, config)
    optim: Foreign = getattr(module, "optim", None)
    if defines(module, "configure_optimizers") and not hasattr(optim, "give_flags"):
        advice = "give the module an optim, nl.MegatronOptimizerModule(config=OptimizerConfig(...)), instead"
        flags.refuse(f"{owner}.configure_optimizers", advice)
    elif hasattr(optim, "give_flags") and stage == "fit":
        optim.give_flags(flags)
    elif stage == "fit":
        advice = (
            "give the module an optim: nl.MegatronOptimizerModule(config=OptimizerConfig(optimizer='adam', lr=...))"
        )
        flags.refuse(f"{owner} has no optimizer", advice)


def give_transformer(flags: Flags, config: TransformerConfig) -> None:
    """Adds the fields of a transformer config that differ from their defaults, and its activation."""
    not_parallel = {name for name in vars(ModelParallelConfig) if name.endswith("_func")}
    flags.give_fields(config, TransformerConfig, {*LEFT_OUT, *not_parallel})
    groups = config.num_query_groups
    if groups is not None and groups != config.num_attention_heads:
        flags.give("group_query_attention", True)
        flags.give("num_query_groups", groups)
    if config.add_qkv_bias and not config.add_bias_linear:
        flags.give("add_qkv_bias", True)
    found = [
        name
        for name, activation in ACTIVATIONS.items()
        if activation.function is config.activation_func and activation.gated == config.gated_linear_unit
    ]
    if found:
        flags.give(found[0], True)
    elif config.activation_func is not nn.functional.gelu or config.gated_linear_unit:
        flags.refuse(f"activation_func={shown(config.activation_func)}", f"give one of {', '.join(ACTIVATIONS)}")
    if not config.bias_activation_fusion and not config.gated_linear_unit:
        flags.give("bias_gelu_fusion", False)


def _give_lengths(flags: Flags, config: Foreign) -> None:
    """Adds the length of samples and the number of positions, from each other where one is missing."""
    longest = getattr(config, "seq_length", None)
    if "seq_length" not in flags.values and longest is not None:
        flags.give("seq_length", longest)
    length = flags.values.get("seq_length")
    if "max_position_embeddings" not in flags.values and length is not None:
        flags.give("max_position_embeddings", max(int(str(length)), int(longest or 0)))


def _give_tokenizer(flags: Flags, module: Foreign, datamodule: Foreign, config: Foreign) -> None:
    """Adds the tokenizer of module or data module. Without one, text consists of ids, as many as the vocabulary."""
    found = [getattr(each, "tokenizer", None) for each in (module, datamodule)]
    tokenizer: Foreign = next((each for each in found if each is not None), None)
    if hasattr(tokenizer, "give_flags"):
        tokenizer.give_flags(flags)
    elif tokenizer is not None:
        advice = "give llm.tokenizer's get_nmt_tokenizer(...) or AutoTokenizer(...), or nothing if text consists of ids"
        flags.refuse(f"tokenizer={shown(tokenizer)}", advice)
    elif "tokenizer_type" not in flags.values:
        sizes = [getattr(each, "vocab_size", None) for each in (config, module, datamodule)]
        rows = next((size for size in sizes if size), None)
        if rows is None and hasattr(datamodule, "paths"):
            what = f"{type(datamodule).__name__} has no tokenizer"
            flags.refuse(
                what, "give it tokenizer=get_nmt_tokenizer(...), or the model's config the vocab_size of the ids"
            )
        flags.give("tokenizer_type", "NullTokenizer")
        flags.give("vocab_size", int(rows or 1))
