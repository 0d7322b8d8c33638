"""Calls in Megatron-LM's form: our code calls a script's layer or attention, or a script calls our layers.

Our layers take the hidden states [t, h] and one record, `LayerInputs`. Megatron-LM's layers take hidden states [s, b,
h] and many keywords (`LayerArguments`), and return a pair (hidden states, context).
"""

import contextvars
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import choose_backend
from megatron.core.communication.collectives import group_size
from megatron.core.context_parallel import sequence_part
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.dropout.dropout import dropout_tokens
from megatron.core.ops.rope import Rotation, rotation_of_angles
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import EncoderStates, LayerInputs, drops, encoder_states_of, sequence_slice
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.keywords import Keywords
from megatron.core.utils.torch_private import in_backward


@dataclass(frozen=True)
class LayerArguments:
    """Megatron-LM's arguments of a layer after the hidden states, in its order."""

    attention_mask: Tensor | None = None
    """bool, broadcasts to [b, heads, s, s]; True hides a key, in addition to the layer's own mask."""
    context: Tensor | None = None
    """The encoder's output [s of the encoder, b, h], for cross attention."""
    context_mask: Tensor | None = None
    rotary_pos_emb: Any = None
    """Angles [s, 1, 1, r] of `RotaryEmbedding(length)`, or the `Rotation` that a block passes."""
    rotary_pos_cos: Any = None
    rotary_pos_sin: Any = None
    attention_bias: Tensor | None = None
    inference_context: Any = None
    packed_seq_params: PackedSeqParams | None = None
    sequence_len_offset: object = None
    inference_params: Any = None
    padding_mask: Tensor | None = None

    @classmethod
    def of(cls, inputs: LayerInputs) -> "LayerArguments":
        """Returns the arguments that correspond to a layer's inputs."""
        tokens, encoder, packed = inputs.tokens, inputs.encoder, None
        if tokens.cu_seqlens is not None:
            bounds, longest = tokens.cu_seqlens, tokens.max_seqlen
            packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
        return cls(
            inputs.attention_mask,
            None if encoder is None else encoder.hidden_states.unflatten(0, (-1, encoder.tokens.batch_size)),
            None if encoder is None else encoder.attention_mask,
            inputs.rotation,
            attention_bias=inputs.attention_bias,
            inference_context=inputs.inference_context,
            packed_seq_params=packed,
            inference_params=inputs.inference_context,
            padding_mask=inputs.padding_mask,
        )


@dataclass(frozen=True)
class _Running:
    """The inputs of the layer that a block calls in Megatron-LM's form, and the arguments of that call."""

    inputs: LayerInputs
    arguments: LayerArguments


_running: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("running", default=None)


def run_script_layer(layer: nn.Module, hidden: Tensor, inputs: LayerInputs) -> Tensor:
    """Returns the hidden states [t, h] after a layer of a block that is called as in Megatron-LM.

    It may call our layer's `forward` in the same form. That call also gets the rest of `inputs`: the position of
    dropout masks, packed documents, the cache of a generation.
    """
    kind: Any = type(layer)
    keywords = Keywords.of_forward(kind)
    arguments = LayerArguments.of(inputs)
    layer.runs_in_block = True  # type: ignore[assignment]
    before = _running.set(_Running(inputs, arguments))
    try:
        output = layer(hidden.unflatten(0, (-1, inputs.tokens.batch_size)), **_accepted(layer, keywords, arguments))
    finally:
        _running.reset(before)
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states.flatten(0, 1)


def attend_as_script(
    core_attention: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    inputs: LayerInputs,
    attn_mask_type: AttnMaskType,
    attention_bias: Tensor | None = None,
) -> Tensor:
    """Returns the output [s, b, a * d] of a script's class of attention, which is called as in Megatron-LM, for query
    [s, b, a, d], key and value [sk, b, g, d].

    It gets those keywords that it accepts: `forward(query, key, value, attention_mask, attn_mask_type, attention_bias,
    packed_seq_params)`. Its mask is bool [b or 1, 1, s, sk] with True for hidden keys, including the keys after each
    token; None: no key is hidden. Raises UserError in cases that these arguments cannot express: parts of a sequence,
    packed documents, generation.
    """
    kind: Any = type(core_attention)
    name = kind.__name__
    if inputs.tokens.cu_seqlens is not None:
        raise UserError(f"{name} as core_attention of a layer spec: not with packed documents (reset_attention_mask)")
    if inputs.inference_context is not None:
        raise UserError(f"{name} as core_attention of a layer spec: not in generation with an inference_context")
    if inputs.tokens.part is not None:
        raise UserError(f"{name} as core_attention of a layer spec: not with context parallelism; use 1")
    if attn_mask_type is AttnMaskType.causal:
        later = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).triu(1)[None, None]
        mask = later if mask is None else mask | later
    offered = {"attn_mask_type": attn_mask_type, "attention_bias": attention_bias, "packed_seq_params": None}
    found: Tensor = core_attention(query, key, value, mask, **Keywords.of_forward(kind).chosen_from(offered))
    return found


def _accepted(layer: nn.Module, keywords: Keywords, arguments: LayerArguments) -> dict[str, object]:
    """Returns the arguments that a layer takes. Raises UserError if it does not take one that the model needs."""
    names = keywords.names
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    old = given.pop("inference_params")
    if "inference_params" in names and "inference_context" not in names:
        given["inference_params"] = old
        del given["inference_context"]
    missing = [name for name, value in given.items() if value is not None and name not in keywords]
    if missing:
        raise UserError(
            f"{type(layer).__name__}.forward of a layer spec does not take {', '.join(missing)}; add **kwargs"
        )
    if given["padding_mask"] is None and "padding_mask" not in names:  # a keyword of few releases
        del given["padding_mask"]
    return keywords.chosen_from(given)


# ---------------------------------------------------------------------------------------------------------------------
# Our layers, called in this form


def inputs_of_arguments(
    layer: nn.Module,
    hidden: Tensor,
    arguments: LayerArguments,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
) -> LayerInputs:
    """Returns the inputs of a layer that is called with hidden states [s, b, h] and Megatron-LM's arguments. If a block
    has called a script's layer, and this is a call inside it, the arguments replace those of the block's inputs. Raises
    UserError for unsupported arguments."""
    running = _running.get()
    if running is None:
        if in_backward() and getattr(layer, "runs_in_block", False):
            raise UserError(
                f"{type(layer).__name__}: a layer of a block that recomputes by itself loses its dropout masks; set "
                "recompute_granularity instead"
            )
        return lone_inputs(hidden, arguments, config, groups, layer.training)
    ranks = group_size(groups.tp) if config.sequence_parallel else 1
    tokens = running.inputs.tokens
    if tuple(hidden.shape[:2]) != (tokens.count // tokens.batch_size // ranks, tokens.batch_size):
        raise UserError(
            f"{type(layer).__name__}: hidden states of shape {list(hidden.shape)} within a block whose micro-batch has "
            f"{tokens.seq_length} tokens in {tokens.batch_size} rows; a layer of a block keeps the tokens"
        )
    return _changed(running, arguments, config)


_HANDED_ON = ("context", "context_mask", "packed_seq_params", "padding_mask", "inference_context", "inference_params")


def _changed(running: _Running, arguments: LayerArguments, config: TransformerConfig) -> LayerInputs:
    """Returns the block's inputs with the mask, bias and rotary positions of the arguments, which may be None."""
    inputs, offered = running.inputs, running.arguments
    _refuse_unknown(arguments)
    for name in _HANDED_ON:
        given = getattr(arguments, name)
        if given is not None and given is not getattr(offered, name):
            raise UserError(f"a layer of a block cannot change {name}; pass on the block's value")
    if arguments.attention_mask is not offered.attention_mask:
        inputs = dataclasses.replace(inputs, attention_mask=arguments.attention_mask)
    if arguments.attention_bias is not offered.attention_bias:
        inputs = dataclasses.replace(inputs, attention_bias=arguments.attention_bias)
    if arguments.rotary_pos_emb is not offered.rotary_pos_emb:
        rotation = _rotation(arguments.rotary_pos_emb, inputs.tokens, config)
        inputs = dataclasses.replace(inputs, rotation=rotation, local_rotation=None)
    return inputs


def lone_inputs(
    hidden: Tensor,
    arguments: LayerArguments,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    training: bool,
) -> LayerInputs:
    """Returns the inputs of layers that are called without a model, for hidden states [s, b, h]. The seed of dropout
    masks is drawn from torch's generator. Rotary positions come from the arguments."""
    _refuse_unknown(arguments)
    if arguments.inference_context is not None or arguments.inference_params is not None:
        raise UserError("inference_context: not in a call of layers without their model; call the model with it")
    ranks = group_size(groups.tp) if config.sequence_parallel else 1
    tokens = Tokens(hidden.shape[0] * ranks, hidden.shape[1], sequence_part(groups))
    packed, dropout = arguments.packed_seq_params, None
    if packed is not None:
        tokens = dataclasses.replace(tokens, cu_seqlens=packed.cu_seqlens_q, max_seqlen=packed.max_seqlen_q)
    if training and drops(config):
        dropout = dropout_tokens(tokens, hidden.device, choose_backend(config).dropout.keep_rows)
    return LayerInputs(
        tokens,
        rotation=_rotation(arguments.rotary_pos_emb, tokens, config),
        attention_mask=arguments.attention_mask,
        padding_mask=arguments.padding_mask,
        dropout=dropout,
        hidden_dropout=sequence_slice(dropout, groups.tp) if config.sequence_parallel else dropout,
        encoder=_encoder(arguments, config, groups, training),
        attention_bias=arguments.attention_bias,
    )


def _encoder(
    arguments: LayerArguments, config: TransformerConfig, groups: ProcessGroupCollection, training: bool
) -> EncoderStates | None:
    context = arguments.context
    if context is None:
        return None
    ranks = group_size(groups.tp) if config.sequence_parallel else 1
    tokens, dropout = Tokens(context.shape[0] * ranks, context.shape[1]), None
    if training and drops(config):
        dropout = dropout_tokens(tokens, context.device, choose_backend(config).dropout.keep_rows)
    return encoder_states_of(
        context,
        tokens,
        groups.tp,
        sequence_parallel=config.sequence_parallel,
        attention_mask=arguments.context_mask,
        dropout=dropout,
    )


def _refuse_unknown(arguments: LayerArguments) -> None:
    for name in ("rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset"):
        if getattr(arguments, name) is not None:
            raise UserError(f"{name} of a layer: not here; give rotary_pos_emb, the angles of these tokens")


def _rotation(given: object, tokens: Tokens, config: TransformerConfig) -> Rotation | None:
    """Returns the rotary positions that `rotary_pos_emb` describes."""
    if isinstance(given, tuple) and len(given) == 2 and given[0] is given[1]:
        given = given[0]  # of queries and keys
    if given is None or isinstance(given, Rotation):
        return given
    if not isinstance(given, Tensor) or given.shape[0] != tokens.seq_length:
        what = f"angles of {given.shape[0]} positions" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise UserError(f"rotary_pos_emb is {what}; give the angles [s, 1, 1, r] of these {tokens.seq_length} tokens")
    scaled = config.rope_scaling_type in ("yarn", "longrope")
    if scaled or getattr(config, "multi_latent_attention", False):
        what = f"rope_scaling_type {config.rope_scaling_type}" if scaled else "multi_latent_attention"
        raise UserError(f"rotary_pos_emb with {what}: angles do not tell the amplitude; give the embedding's Rotation")
    return rotation_of_angles(given, config.rotary_interleaved)
