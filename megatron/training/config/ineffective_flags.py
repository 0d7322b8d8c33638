"""Flags that were given and change nothing because of another's value, where `only_with` cannot say it."""

from collections.abc import Iterator

from megatron.training.config.settings import Settings

_AT_HOME = "hides nothing with {expert_model_parallel_size}, where every expert is at home"


def ineffective_flags(s: Settings) -> Iterator[str]:
    """A sentence in the grammar of `config_fields` for each; of a flag without experts `only_with` speaks."""
    if s.num_moe_experts is None:
        return
    if s.moe_router_pre_softmax and s.moe_router_score_function == "sigmoid":
        yield "{moe_router_pre_softmax}: has no effect with {moe_router_score_function}"
    if s.expert_model_parallel_size > 1:
        return
    if s.moe_shared_expert_overlap and s.moe_shared_expert_intermediate_size is not None:
        yield f"{{moe_shared_expert_overlap}}: {_AT_HOME}"
    if s.overlap_moe_expert_parallel_comm and (s.expert_tensor_parallel_size or s.tensor_model_parallel_size) == 1:
        yield f"{{overlap_moe_expert_parallel_comm}}: {_AT_HOME}; it only keeps one micro-batch's activations more"
