"""Rules between the flags of low-rank adapters and others."""

from collections.abc import Iterator

from megatron.training.config.settings import Settings

_FROZEN = {
    "fp8": "products of adapted layers are not in fp8 yet",
    "fp4": "products of adapted layers are not in fp4 yet",
    "tp_comm_overlap": "adapted layers do not cut their products in pieces",
    "qk_clip": "it scales weights, which adapters leave as they are",
    "moe_use_upcycling": "it makes new weights; upcycle in a run of its own",
    "save_hf_interval": "checkpoints contain adapters alone; export them with tools/checkpoint/adapters.py export",
    "use_mup": "it has no rule for the learning rates of adapters",
}
"""Switches and values that do not go with adapters, each with the reason."""


def has_base(s: Settings) -> Iterator[str]:
    """Adapters have a model to adapt."""
    if s.lora_rank is not None and s.pretrained_checkpoint is None and s.load_hf is None:
        yield (
            "{lora_rank} adapts a trained model: give {pretrained_checkpoint:name}, the folder of its checkpoints, or "
            "{load_hf:name}, a folder of the hub"
        )


def goes_with(s: Settings) -> Iterator[str]:
    """Adapters go only with options that work beside frozen weights."""
    if s.lora_rank is None:
        return
    for field, reason in _FROZEN.items():
        if s.values.get(field) not in (None, False):
            yield f"{{lora_rank:name}} does not go with {{{field}}}: {reason}"
    if s.lora_base_weights == "nf4" and s.param_nvme_offload_path is not None:
        yield (
            "{lora_base_weights} does not go with {param_nvme_offload_path:name}: frozen weights in 4 bits stay in "
            "memory, sharded; leave one of them out"
        )
    if s.transformer_impl == "transformer_engine":
        yield "{lora_rank:name} does not go with {transformer_impl}; {transformer_impl:name} auto works"
    if s.optimizer in ("muon", "dist_muon"):
        yield "{lora_rank:name} does not go with {optimizer}, which is for whole matrices; adam and sgd work"
    if s.moe_router_enable_expert_bias and s.moe_router_bias_update_rate:
        yield (
            "{moe_router_enable_expert_bias:name} moves the biases of frozen routers; with {lora_rank:name} give "
            "{moe_router_bias_update_rate:name} 0"
        )
    if s.model_family in ("bert", "t5"):
        yield f"{{lora_rank:name}} is for decoders (GPT, hybrid models) so far, not for {s.model_family}"
