"""Notes about flags that were given and change nothing, or not what their name suggests."""

from collections.abc import Iterator

from megatron.core.declarations.config_fields import value_text
from megatron.core.ops.transformer_engine.engine import uses_engine
from megatron.core.transformer.config.memory import captured_parts, captures_micro_batches, why_no_part_is_captured
from megatron.core.transformer.config.router import BALANCE_LOSSES, listed
from megatron.core.transformer.layer_patterns import layer_parts
from megatron.data.datasets.utils import parse_split
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.flag_table import Flag, flag_table, parent_of
from megatron.training.config.model_families import NAMES
from megatron.training.config.settings import Settings


def notes_on_ineffective_flags(s: Settings) -> Iterator[str]:
    """Yields a sentence for each flag without effect, in the grammar of `config_fields`. Expects checked values."""
    yield from _declared(s)
    yield from _at_default(s)
    for rule in (
        _communicators,
        _tensor_overlap,
        _gathers_in_fp8,
        _attention,
        _graphs,
        _experts,
        _expert_overlap,
        _data,
        _tokenizer,
        _evaluation,
    ):
        yield from rule(s)


def is_read(flag: Flag, settings: Settings) -> bool:
    """Whether a run reads this flag: the flag named by its `only_with` or `or_with` is set as required."""
    parent, alternative = parent_of(flag), flag.declaration.or_with
    if parent is None or (alternative is not None and getattr(settings, alternative)):
        return True
    other, required = parent
    value = getattr(settings, other.field)
    if required:
        return value_text(value) in required.split("|")
    return value is not False and (value != other.default or other.default is True)


def _declared(settings: Settings) -> Iterator[str]:
    """Flags that have no effect, or none without another flag, as their declarations say."""
    for field, flag in flag_table().items():
        value = getattr(settings, field)
        if not settings.is_given(field) or value == flag.default:
            continue
        families = flag.declaration.families
        if families is not None and settings.model_family not in (None, *families):
            yield f"{{{field}}}: has no effect for {NAMES[settings.model_family]}"
        elif flag.declaration.no_effect is not None:
            yield f"{{{field}}}: {flag.declaration.no_effect}"
        elif not is_read(flag, settings):
            yield f"{{{field}}}: has no effect {_condition(flag, settings)}"
        elif (parent := parent_of(flag)) is not None and parent[0].declaration.no_effect is not None:
            yield f"{{{field}}}: {parent[0].declaration.no_effect}"


def _at_default(settings: Settings) -> Iterator[str]:
    """Yields one line for all flags that are given at their default and have no effect without another flag. Scripts
    copied from Megatron-LM give many of these, so they do not get a line each."""
    idle = []
    for field, flag in flag_table().items():
        if field == "moe_router_topk" or not settings.is_given(field) or getattr(settings, field) != flag.default:
            continue  # `_experts` has a line for --moe-router-topk
        families = flag.declaration.families
        if families is not None and settings.model_family not in (None, *families):
            idle.append(f"{{{field}}} (for {NAMES[settings.model_family]})")
        elif flag.declaration.no_effect is None and not is_read(flag, settings):
            idle.append(f"{{{field}}} ({_condition(flag, settings)})")
    if idle:
        yield f"given at {'its default' if len(idle) == 1 else 'their defaults'}, without effect: {', '.join(idle)}"


def _condition(flag: Flag, settings: Settings) -> str:
    """Returns what the flag lacks: "without --other", "with --no-other" or "while --other is 1"."""
    parent = parent_of(flag)
    assert parent is not None
    other, required = parent
    value = getattr(settings, other.field)
    if required:
        return f"without {other.spelling} {required.replace('|', ' or ')}"
    if other.switch is not None and not other.switch[other.spelling]:
        return f"with {other.spelling}"
    return f"without {other.spelling}" if value is None or value is False else f"while {other.spelling} is {value}"


# ---------------------------------------------------------------------------------------------------------------------
# Conditions that a declaration cannot express


def _tensor_overlap(s: Settings) -> Iterator[str]:
    if s.tp_comm_overlap and s.sequence_parallel and s.tensor_model_parallel_size > 1 and s.fp8 is not None:
        yield (
            "{tp_comm_overlap}: products in fp8 are not cut, since a scale needs the largest value of all rows; layers "
            "in other formats are"
        )


def _gathers_in_fp8(s: Settings) -> Iterator[str]:
    if not s.fp8_param_gather or s.fp8 is None:
        return
    if s.fp8_recipe == "rowwise":
        yield (
            "{fp8_param_gather}: has no effect with {fp8_recipe}, whose transposed weights have other scales; weights "
            "stay in the model's type too"
        )
    elif s.transformer_impl == "transformer_engine" and uses_engine(s):
        yield (
            "{fp8_param_gather}: has no effect with {transformer_impl}, whose layers quantise weights of the model's "
            "type; results are the same"
        )
    elif s.use_precision_aware_optimizer or s.optimizer_cpu_offload:
        other = "use_precision_aware_optimizer" if s.use_precision_aware_optimizer else "optimizer_cpu_offload"
        yield (
            f"{{fp8_param_gather}}: with {{{other}}} a rank also keeps its shard of these weights in the model's type, "
            "so on one data parallel rank they take no fewer bytes"
        )


def _communicators(s: Settings) -> Iterator[str]:
    if s.nccl_communicator_config_path is not None and s.distributed_backend == "gloo":
        yield "{nccl_communicator_config_path:name}: has no effect with gloo, which has no such settings"


def _attention(s: Settings) -> Iterator[str]:
    if s.multi_latent_attention and s.is_given("kv_channels"):
        yield "{kv_channels:name}: has no effect with {multi_latent_attention}, which has head widths of its own"
    measuring = [name for name in ("qk_clip", "log_max_attention_logit") if getattr(s, name)]
    layers = range(1, s.num_layers + (s.mtp_num_layers or 0) + 1) if measuring else ()
    if not any(layer_parts(s, number).token_mixer == "attention" for number in layers):
        for name in measuring:
            yield f"{{{name}:name}}: has no effect: it measures dense softmax attention, which no layer has"


def _graphs(s: Settings) -> Iterator[str]:
    parts = captured_parts(s)
    captures = captures_micro_batches(s) or parts or s.optimizer_cuda_graph
    name = "{external_cuda_graph:name}" if s.external_cuda_graph else "{cuda_graph_impl}"
    reason = why_no_part_is_captured(s) if parts else None
    if reason:
        yield f"{name}: has no effect: {reason}; results are the same"
    elif parts and (s.external_cuda_graph or s.cuda_graph_impl == "transformer_engine"):
        given = " ".join(part for part in parts if part != "moe_preprocess")
        yield f"{name}: this package makes the graphs, as with local and {{cuda_graph_scope:name}} {given}"
    if "moe_preprocess" in parts:
        yield "moe_preprocess has no effect in a graph: tokens are counted where they are sent, without a graph"
    if s.is_given("cuda_graph_warmup_steps") and not captures:
        yield (
            "{cuda_graph_warmup_steps}: has no effect without {cuda_graph_impl:name} local, {enable_cuda_graph:name} "
            "or {optimizer_cuda_graph:name}"
        )


def _experts(s: Settings) -> Iterator[str]:
    if s.num_moe_experts is None:
        # Noted for the default value too: a user who gives this flag expects experts, and would train a dense model.
        if s.is_given("moe_router_topk") and s.moe_router_topk == flag_table()["moe_router_topk"].default:
            yield "{moe_router_topk}: has no effect without {num_moe_experts:name}"
        return
    pattern = s.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) == s.num_layers and not any(pattern):
        yield "{num_moe_experts}: has no effect, since {moe_layer_freq:name} gives experts to no layer"
        return
    if s.moe_router_pre_softmax and s.moe_router_score_function == "sigmoid":
        yield "{moe_router_pre_softmax}: has no effect with {moe_router_score_function}"
    kinds, coefficients = listed(s.moe_router_load_balancing_type), listed(s.moe_aux_loss_coeff)
    if kinds == ["none"] and any(coefficients):
        yield "{moe_aux_loss_coeff}: has no effect with {moe_router_load_balancing_type}"
    by_bias = s.moe_router_enable_expert_bias and not s.is_given("moe_router_load_balancing_type")
    coefficients *= len(kinds) if len(coefficients) == 1 else 1
    idle = [kind for kind, weight in zip(kinds, coefficients, strict=True) if kind in BALANCE_LOSSES and not weight]
    if idle and not by_bias:
        yield (
            f"{{moe_router_load_balancing_type}}: {' and '.join(idle)} does not balance the experts with "
            "{moe_aux_loss_coeff}; a coefficient above 0 does, such as 0.01"
        )


def _expert_overlap(s: Settings) -> Iterator[str]:
    if s.num_moe_experts is None:
        return
    if s.expert_model_parallel_size > 1:
        yield from _local_tokens(s)
        return
    nothing_to_hide = "has no effect with {expert_model_parallel_size}: tokens are not sent to other ranks"
    if s.moe_shared_expert_overlap and s.moe_shared_expert_intermediate_size is not None:
        yield f"{{moe_shared_expert_overlap}}: {nothing_to_hide}"
    if s.moe_local_token_overlap:
        yield f"{{moe_local_token_overlap}}: {nothing_to_hide}"
    if s.moe_balanced_expert_placement:
        yield "{moe_balanced_expert_placement}: has no effect with {expert_model_parallel_size}: nothing to swap"
    if (s.expert_tensor_parallel_size or s.tensor_model_parallel_size) > 1:
        return
    if s.delay_wgrad_compute:
        yield f"{{delay_wgrad_compute}}: {nothing_to_hide}"
    if s.overlap_moe_expert_parallel_comm:
        yield (
            f"{{overlap_moe_expert_parallel_comm}}: {nothing_to_hide}, and one more micro-batch's activations are kept"
        )


def _local_tokens(s: Settings) -> Iterator[str]:
    dispatcher = s.moe_token_dispatcher_type
    if s.moe_local_token_overlap:
        if dispatcher == "alltoall":
            yield "{moe_local_token_overlap}: has no effect with {moe_token_dispatcher_type}; use flex or allgather"
        elif dispatcher == "allgather" and s.fp8 is not None:
            yield "{moe_local_token_overlap}: has no effect with {fp8} and {moe_token_dispatcher_type}; use flex"
    if s.moe_dispatcher_transport == "symmetric-memory":
        if dispatcher == "alltoall":
            yield (
                "{moe_dispatcher_transport}: has no effect with {moe_token_dispatcher_type}; use flex, or allgather "
                "with {moe_local_token_overlap:name}"
            )
        elif dispatcher == "allgather" and not s.moe_local_token_overlap:
            yield (
                "{moe_dispatcher_transport}: has no effect with {moe_token_dispatcher_type} without "
                "{moe_local_token_overlap:name}"
            )


def _data(s: Settings) -> Iterator[str]:
    if s.is_given("split") and s.mock_data:
        yield "{split}: has no effect with {mock_data}, which makes up data for training, validation and test"
    elif s.split is not None and s.eval_iters == 0 and any(parse_split(s.split)[1:]):
        yield "{split}: the validation and test parts are not read with {eval_iters}; {split:name} 1 trains on all data"
    if s.fim_data and s.mock_data:
        yield "{fim_data}: has no effect with {mock_data}, whose ids are not text"
    if s.sft and s.mock_data:
        yield "{sft}: has no effect with {mock_data}, which makes up no conversations"
    if s.skip_train and s.train_data_path is not None:
        yield "{train_data_path}: has no effect with {skip_train}"
    for field in ("valid_data_path", "test_data_path"):
        if s.eval_iters == 0 and getattr(s, field) is not None:
            yield f"{{{field}}}: has no effect with {{eval_iters}}"


def _tokenizer(s: Settings) -> Iterator[str]:
    config = s.build(TokenizerConfig)
    for field in ("vocab_file", "merge_file", "tokenizer_model"):
        if getattr(s, field) is not None and field not in config.files:
            yield f"{{{field}}}: has no effect with {{tokenizer_type:name}} {config.family}, which does not read it"


def _evaluation(s: Settings) -> Iterator[str]:
    if s.eval_iters == 0 and s.eval_interval is not None:
        yield "{eval_interval}: has no effect with {eval_iters}"
    if s.eval_iters == 0 and s.multiple_validation_sets:
        yield "{multiple_validation_sets}: has no effect with {eval_iters}"
