"""Notes about flags that were given and change nothing, or not what their name suggests: as their declarations say
(`only_with`), and by rules where a declaration cannot say so.

Each rule yields a sentence for each such flag, in the grammar of `config_fields`. It expects checked values.
"""

from collections.abc import Callable, Iterator

from megatron.core.context_parallel.comm_types import asks_to_gather
from megatron.core.exceptions import UserError
from megatron.core.ops.transformer_engine.engine import uses_engine
from megatron.core.transformer.config.memory import captures_micro_batches
from megatron.core.transformer.config.router import BALANCE_LOSSES, listed
from megatron.core.transformer.layer_patterns import has_mixer, hybrid_letters, layer_parts
from megatron.data.datasets.object_store import is_url
from megatron.data.datasets.utils import get_blend_from_list, parse_split
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.conditions import lacking, needs_of, ways_of
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.model import ACTIVATIONS
from megatron.training.config.model_families import NAMES
from megatron.training.config.settings import Settings


def _tensor_overlap(s: Settings) -> Iterator[str]:
    if s.tp_comm_overlap and s.sequence_parallel and s.tensor_model_parallel_size > 1 and s.fp8 is not None:
        yield (
            "{tp_comm_overlap}: products in fp8 are not cut, since a scale needs the largest value of all rows; layers "
            "in other formats are"
        )


def _gathers_in_fp8(s: Settings) -> Iterator[str]:
    if not s.fp8_param_gather or s.fp8 is None:
        return
    if s.fp8_recipe == "mxfp8":
        yield (
            "{fp8_param_gather}: has no effect with {fp8_recipe}, where a weight and its transpose have different "
            "blocks; weights are gathered in the model's type"
        )
    elif s.transformer_impl == "transformer_engine" and uses_engine(s.transformer):
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


def _gathered_keys(s: Settings) -> Iterator[str]:
    if s.context_parallel_size > 1 and asks_to_gather(s.cp_comm_type):
        yield "{cp_comm_type}: the ring of p2p computes; it sends no more than a gather of all keys, and is faster"


def _communicators(s: Settings) -> Iterator[str]:
    if s.nccl_communicator_config_path is not None and s.distributed_backend == "gloo":
        yield "{nccl_communicator_config_path:name}: has no effect with gloo, which has no such settings"


def _activation(s: Settings) -> Iterator[str]:
    chosen = [field for field in ACTIVATIONS if getattr(s, field)]
    if s.is_given("bias_gelu_fusion") and (chosen or not s.add_bias_linear):
        other = f"{{{chosen[0]}}}" if chosen else "{add_bias_linear}"
        yield f"{{bias_gelu_fusion}}: has no effect with {other}; it is for the GELU of layers with biases"


def _window(s: Settings) -> Iterator[str]:
    if s.window_size is None:
        return
    left, right = s.window_size
    if left == right == -1:
        yield "{window_size}: has no effect: -1 means all keys, on both sides"
    elif s.model_family == "gpt" and right > 0:
        yield f"{{window_size}}: the second number has no effect: a GPT sees no later tokens; {left},0 means the same"


def _token_mixers(s: Settings) -> Iterator[str]:
    """Sizes of token mixers that no letter of a hybrid model stands for, and options of attention in a model without
    it."""
    letters = hybrid_letters(s.transformer)
    if letters is None:
        return
    for start, (mixer, letter) in _SIZES_OF_MIXERS.items():
        given = [field for field in s.values if field.startswith(start) and s.is_given(field)]
        if given and not has_mixer(s.transformer, mixer):
            names = ", ".join(f"{{{field}}}" for field in given)
            yield f"{names}: no effect, since {{hybrid_layer_pattern}} has no layer {letter}"
    options = [
        field
        for field, flag in flag_table().items()
        if flag.group == "attention"
        and s.is_given(field)
        and getattr(s, field) != flag.default
        and flag.declaration.no_effect is None
        and field not in _SAID_ELSEWHERE
    ]
    if options and not (has_mixer(s.transformer, "attention") or has_mixer(s.transformer, "dsa")):
        names = ", ".join(f"{{{field}}}" for field in options)
        yield f"{names}: no effect, since {{hybrid_layer_pattern}} has no layer of attention (*)"


_SIZES_OF_MIXERS = {"mamba_": ("mamba", "M"), "linear_": ("gated_delta_net", "G"), "dsa_": ("dsa", "D")}
"""Starts of the names of fields, and the token mixer that they describe, with its letter."""
_SAID_ELSEWHERE = ("qk_clip", "log_max_attention_logit", "window_size")


def _attention(s: Settings) -> Iterator[str]:
    if s.multi_latent_attention and s.is_given("kv_channels"):
        yield "{kv_channels:name}: has no effect with {multi_latent_attention}, which has head widths of its own"
    measuring = [name for name in ("qk_clip", "log_max_attention_logit") if getattr(s, name)]
    layers = range(1, s.num_layers + (s.mtp_num_layers or 0) + 1) if measuring else ()
    if not any(layer_parts(s.transformer, number).token_mixer == "attention" for number in layers):
        for name in measuring:
            yield f"{{{name}:name}}: has no effect: it measures dense softmax attention, which no layer has"


def _memory(s: Settings) -> Iterator[str]:
    if s.recompute_activations and s.recompute_granularity != "selective":
        yield "{recompute_activations}: has no effect with {recompute_granularity}, which recomputes more"


def _layout(s: Settings) -> Iterator[str]:
    if s.use_megatron_fsdp and s.data_parallel_sharding_strategy == "no_shard":
        yield (
            "{use_megatron_fsdp}: shards nothing with {data_parallel_sharding_strategy}; optim, optim_grads and "
            "optim_grads_params shard"
        )
    has_chunks = (s.virtual_pipeline_model_parallel_size, s.pipeline_model_parallel_layout) != (None, None)
    if s.microbatch_group_size_per_vp_stage is not None and s.pipeline_model_parallel_size > 1 and not has_chunks:
        yield "{microbatch_group_size_per_vp_stage}: has no effect without {num_virtual_stages_per_pipeline_rank:name}"
    levels = s.hierarchical_context_parallel_sizes
    if s.context_parallel_size > 1 and levels is not None and "a2a+p2p" not in listed(s.cp_comm_type):
        yield "{hierarchical_context_parallel_sizes}: has no effect with {cp_comm_type}; a2a+p2p has levels"


def _few_ranks(s: Settings) -> Iterator[str]:
    if s.world_size == 1:
        for field in ("hang_timeout_seconds", "distributed_timeout_minutes", "distributed_timeout_seconds_after_init"):
            if s.is_given(field):
                yield f"{{{field}}}: has no effect in one process, which waits for no other"
    replicas = s.data_parallel_size * s.context_parallel_size
    if s.check_weight_hash_across_dp_replicas_interval is not None and replicas == 1:
        yield "{check_weight_hash_across_dp_replicas_interval}: has no effect: there is one replica of the weights"


def _schedule(s: Settings) -> Iterator[str]:
    is_replaced = s.start_weight_decay is not None and s.end_weight_decay is not None
    if s.is_given("weight_decay") and s.weight_decay_incr_style != "constant" and is_replaced:
        yield "{weight_decay}: has no effect with {start_weight_decay} and {end_weight_decay}"


def _graphs(s: Settings) -> Iterator[str]:
    if s.is_given("cuda_graph_warmup_steps") and not captures_micro_batches(s.transformer):
        yield (
            "{cuda_graph_warmup_steps}: has no effect without {cuda_graph_impl:name} local or {enable_cuda_graph:name}"
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
    idle_modules = [name for name in ("mlp", "mlp_act") if name in (s.recompute_modules or ())]
    if pattern == 1 and idle_modules and s.recompute_granularity == "selective":
        yield f"{{recompute_modules}}: {' and '.join(idle_modules)} has no effect: every layer has experts"
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
        return
    nothing_to_hide = "has no effect with {expert_model_parallel_size}: tokens are not sent to other ranks"
    if s.moe_shared_expert_overlap and s.moe_shared_expert_intermediate_size is not None:
        yield f"{{moe_shared_expert_overlap}}: {nothing_to_hide}"
    if (s.expert_tensor_parallel_size or s.tensor_model_parallel_size) > 1:
        return
    if s.delay_wgrad_compute:
        yield f"{{delay_wgrad_compute}}: {nothing_to_hide}"


def _data(s: Settings) -> Iterator[str]:
    if s.is_given("split") and s.mock_data:
        yield "{split}: has no effect with {mock_data}, which makes up data for training, validation and test"
    elif s.split is not None and s.eval_iters == 0 and any(parse_split(s.split)[1:]):
        yield "{split}: the validation and test parts are not read with {eval_iters}; {split:name} 1 trains on all data"
    if s.fim_data and s.mock_data:
        yield "{fim_data}: has no effect with {mock_data}, whose ids are not text"
    if s.sft and s.mock_data:
        yield "{sft}: has no effect with {mock_data}, which makes up no conversations"
    prefixes = list(_prefixes(s))
    if len(prefixes) == 1:
        for field in ("mid_level_dataset_surplus", "num_dataset_builder_threads"):
            if s.is_given(field):
                yield f"{{{field}}}: has no effect: {{data_path}} is one data set, not a blend"
    if prefixes and s.object_storage_cache_path is not None and not any(map(is_url, prefixes)):
        yield "{object_storage_cache_path}: has no effect: {data_path} is on this machine, not in an object store"


def _prefixes(s: Settings) -> list[str]:
    """Returns the data sets of --data-path."""
    try:
        blend = get_blend_from_list(s.data_path)
    except UserError:
        return []
    return [] if blend is None else list(blend[0])


def _tokenizer(s: Settings) -> Iterator[str]:
    config = s.build(TokenizerConfig)
    for field in ("vocab_file", "merge_file", "tokenizer_model"):
        of_export = field == "tokenizer_model" and config.family == "NullTokenizer"
        if getattr(s, field) is not None and field not in config.fields_read and not of_export:
            yield f"{{{field}}}: has no effect with {{tokenizer_type:name}} {config.family}, which does not read it"


def _evaluation(s: Settings) -> Iterator[str]:
    if s.eval_fresh_samples and s.full_validation:
        yield "{eval_fresh_samples}: has no effect with {full_validation:name}, which reads all samples each time"
    if s.eval_fresh_samples and s.dataloader_type == "external":
        yield "{eval_fresh_samples}: has no effect with {dataloader_type}, whose iterators always continue"


RULES: tuple[Callable[[Settings], Iterator[str]], ...] = (
    _communicators,
    _gathered_keys,
    _tensor_overlap,
    _gathers_in_fp8,
    _activation,
    _window,
    _token_mixers,
    _attention,
    _memory,
    _layout,
    _few_ranks,
    _schedule,
    _graphs,
    _experts,
    _expert_overlap,
    _data,
    _tokenizer,
    _evaluation,
)


def notes_on_ineffective_flags(s: Settings) -> Iterator[str]:
    """Yields a sentence for each flag without effect, in the grammar of `config_fields`. Expects checked values."""
    yield from _declared(s)
    yield from _at_default(s)
    for rule in RULES:
        yield from rule(s)


def is_read(flag: Flag, settings: Settings) -> bool:
    """Whether a run reads this flag: the flags that it depends on are set as its declaration requires."""
    return lacking(flag, lambda field: getattr(settings, field)) is None


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
            yield f"{{{field}}}: has no effect {_lack(flag, settings)}"
        else:
            inert = (need.flag.declaration.no_effect for need in needs_of(flag))
            yield from (f"{{{field}}}: {reason}" for reason in inert if reason is not None)


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
            idle.append(f"{{{field}}} ({_lack(flag, settings)})")
    if idle:
        yield f"given at {'its default' if len(idle) == 1 else 'their defaults'}, without effect: {', '.join(idle)}"


def _lack(flag: Flag, settings: Settings) -> str:
    """Returns what the flag lacks: "without --other", "with --no-other" or "while --other is 1"."""
    condition = lacking(flag, lambda field: getattr(settings, field))
    assert condition is not None
    lack = condition.lack(getattr(settings, condition.flag.field))
    ways = " or ".join(way.text().removeprefix("with ") for way in ways_of(flag) if condition in needs_of(flag))
    if not ways:
        return lack
    return f"{lack} or {ways}" if lack.startswith("without ") else f"{lack} and without {ways}"
