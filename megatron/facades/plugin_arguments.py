"""The values that Hugging Face Accelerate's Megatron plugin sets on the arguments, in terms of our flags.

The plugin (`accelerate.utils.MegatronLMPlugin`) calls `parse_args`, writes its settings and those of a transformers
config onto the result, and calls `validate_args`. Most names are those of flags. The others are translated here.
"""

from argparse import Namespace

from megatron.core.exceptions import UserError
from megatron.core.transformer.enums import AttnBackend

_OF_PLUGIN = ("megatron_dataset_flag", "model_type_name", "num_micro_batches")
_REFUSED = {
    "use_custom_fsdp": "not yet; use_distributed_optimizer shards the optimizer, and --data-parallel-sharding-strategy "
    "as one of other_megatron_args shards weights and gradients too",
    "return_logits": "not yet: a loss is computed without keeping the logits; leave it out, or give "
    "custom_train_step_class",
    "no_wd_decay_cond": "not yet; the weights of norms and biases have no weight decay",
    "scale_lr_cond": "not yet; --decoupled-lr gives embedding and head a rate of their own",
    "pipeline_model_parallel_split_rank": "not yet; give pp_degree alone",
}


def is_of_plugin(args: object) -> bool:
    """Returns whether Accelerate's plugin has written these arguments."""
    return all(hasattr(args, name) for name in _OF_PLUGIN)


def take_plugin_values(args: Namespace) -> None:
    """Translates the plugin's values in place. Raises UserError for a value that has no counterpart, and for a model
    that is not a GPT."""
    if args.model_type_name != "gpt":
        raise UserError(
            f"MegatronLMPlugin: a model of type {args.model_type_name} is not here: the plugin builds it from the "
            "models before megatron.core; train it with pretrain_bert.py or pretrain_t5.py"
        )
    for name, advice in _REFUSED.items():
        if getattr(args, name, None):
            raise UserError(f"MegatronLMPlugin: {name}: {advice}")
    if getattr(args, "lr_mult", 1.0) != 1.0:
        raise UserError("MegatronLMPlugin: lr_mult: not yet; multiply the learning rate of the optimizer instead")
    if isinstance(args.attention_backend, bool):  # the plugin knows a switch, the flag a name
        args.attention_backend = AttnBackend.auto if args.attention_backend else AttnBackend.unfused
    if getattr(args, "use_rotary_position_embeddings", False) and args.position_embedding_type == "learned_absolute":
        args.position_embedding_type = "rope"
    if args.calculate_per_token_loss:  # the plugin's default
        args.calculate_per_token_loss = False
        if args.rank == 0:
            print(
                "MegatronLMPlugin: calculate_per_token_loss: has no effect, because the plugin's loss functions return "
                "the mean of a micro-batch; the means of micro-batches are averaged",
                flush=True,
            )
    if args.vocab_file is None and args.tokenizer_model is None:
        # The script tokenizes its text itself. Our null tokenizer has one id more than --vocab-size says.
        args.tokenizer_type, args.vocab_size = "NullTokenizer", args.orig_vocab_size - 1
