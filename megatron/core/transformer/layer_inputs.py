"""Inputs of the layers in addition to the hidden states; built once per micro-batch on each stage."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.dropout.dropout import DropoutRngPosition, DropoutTokens
from megatron.core.ops.rope import Rotation
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tokens import Tokens
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.keywords import Keywords


@dataclass(frozen=True)
class CachedKeyValues:
    """Keys and values [sk, b, g, d] that the current tokens attend to."""

    key: Tensor
    value: Tensor
    query_positions: Tensor | None
    """int64 [b, s]: position of each token as an index of a key; None: the tokens are the last keys."""


class InferenceContext(Protocol):
    """A cache for text generation of the data that layers need from earlier tokens: keys and values, and the states of
    recurrent layers."""

    max_sequence_length: int
    """Number of tokens of the longest row that the cache can hold."""

    @property
    def extent(self) -> int:
        """Number of tokens of the longest row, including the current tokens."""

    @property
    def gathers_logits(self) -> bool:
        """Whether a model always gathers its logits over tensor parallel ranks; if False, its arguments decide."""

    def start(self, tokens: Tokens, device: torch.device) -> Tokens:
        """Prepares for a call of the model with these tokens. Returns them with their positions if the context knows
        them."""

    def mask_of_call(self, mask: Tensor | None) -> Tensor | None:
        """Returns the mask (True hides a key) that the call's tokens need in addition to the causal mask; None: no
        further mask."""

    def extend(self, layer_number: int, key: Tensor, value: Tensor, reader: str = "attention") -> CachedKeyValues:
        """Adds the keys and values [s, b, g, d] of the current tokens for a layer. Returns all that the tokens attend
        to. `reader` names the part of the layer that keeps them, if a layer has several."""

    def token_counts(self) -> Tensor:
        """Returns the number of current tokens of each row without padding, int64 [b]. Padding comes at the end."""

    def recall(self, layer_number: int, part: str, *, moves: bool = True) -> Tensor | None:
        """Returns the state that a layer kept after the previous tokens; None before the first tokens. `moves`: the
        state changes with each token."""

    def remember(self, layer_number: int, part: str, state: Tensor) -> None:
        """Keeps a state of a layer after the current tokens. `part` names the state, if a layer has several. The first
        dimension of a state that `moves` is the row."""

    def select_last(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states from which tokens are predicted: the last ones, [1, b, h], or all, [s, b, h]."""


@dataclass(frozen=True)
class EncoderStates:
    """The encoder's output, which the decoder's cross attention reads."""

    hidden_states: Tensor
    """[t, h] of all tokens of the encoder, also under sequence parallelism. With tensor parallelism each rank's
    gradient is its part of a sum (see `encoder_states_of`)."""
    tokens: Tokens
    """The encoder's tokens."""
    attention_mask: Tensor | None = None
    """bool, broadcasts to [b, heads, s of the decoder, s of the encoder]; True hides a key."""
    dropout: DropoutTokens | None = None
    """Random positions of the encoder's tokens; None: no dropout."""


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer in addition to the hidden states [t, h]. A layer is a pure function of both."""

    tokens: Tokens
    rotation: Rotation | None = None
    """Rotary positions of these tokens; None: the model has no rotary positions."""
    local_rotation: Rotation | None = None
    """Rotary positions in layers with a `window_size`; None: the same as in all layers."""
    query_scale: Tensor | None = None
    """Factor of the queries in layers without rotary positions, [s, b or 1, 1, 1]; None: 1."""
    attention_mask: Tensor | None = None
    """bool, broadcasts to [b, heads, s, s]; True hides a key, in addition to the layer's own mask."""
    padding_mask: Tensor | None = None
    """bool [b, s]: True for padding, which routers send to no expert; None: there is no padding."""
    dropout: DropoutTokens | None = None
    """Random positions of all these tokens, for attention; None: no dropout."""
    hidden_dropout: DropoutTokens | None = None
    """Random positions of the tokens whose hidden states this rank holds; None: those of all tokens."""
    inference_context: InferenceContext | None = None
    auxiliary_scale: Tensor | None = None
    """Gradient of every loss that a layer adds to the model's loss (see `ops.attached_loss`): a scalar on the device;
    None: 1."""
    turn: CooperativeTurn | None = None
    """Set if backward delays weight gradients; see `MicroBatch.turn`."""
    encoder: EncoderStates | None = None
    """The inputs of cross attention; None: the layers have no cross attention."""
    attention_bias: Tensor | None = None
    """Added to the scores of self-attention; broadcasts to [b, this rank's heads, s, s]."""
    stack: str = ""
    """Prefix of the names of dropout sites. It distinguishes the layers of an encoder from those of the decoder, which
    have the same numbers."""

    def repeated(self, times: int) -> "LayerInputs":
        """Returns the inputs for a layer that has run `times` times before on these tokens. It gets
        different dropout masks."""
        return dataclasses.replace(self, stack=f"{self.stack}repeat {times} ")

    def dropout_position(self, layer_number: int, site: str) -> DropoutRngPosition | None:
        """Returns the random position of all tokens at one dropout site of one layer (counted from 1); None: no
        dropout."""
        return None if self.dropout is None else DropoutRngPosition(self.dropout, layer_number, self.stack + site)

    def hidden_dropout_position(self, layer_number: int, site: str) -> DropoutRngPosition | None:
        """Returns the random position of the hidden states that this rank holds; see `dropout_position`."""
        dropout = self.hidden_dropout or self.dropout
        return None if dropout is None else DropoutRngPosition(dropout, layer_number, self.stack + site)


def key_padding_mask(mask: Tensor) -> Tensor:
    """Returns the attention mask that hides padding from every query: bool [b, 1, 1, s], True hides the key, for a mask
    [b, s] that is 0 or False for padding. Queries at padding are computed, but their results are not used. In a row
    that is all padding no key is hidden, because a query without keys gives NaN in some kernels."""
    hidden = ~mask.to(torch.bool)[:, None, None, :]
    return hidden & ~hidden.all(-1, keepdim=True)


def sequence_slice(dropout: DropoutTokens | None, group: Group) -> DropoutTokens | None:
    """Returns the part of the tokens whose hidden states a rank of a sequence parallel group holds: equal parts of [t,
    h], in memory order."""
    if dropout is None:
        return None
    return dataclasses.replace(dropout, index=dropout.index.chunk(group_size(group))[group_rank(group)])


def drops(config: TransformerConfig) -> bool:
    """Returns whether the config has any dropout."""
    return config.hidden_dropout > 0 or config.attention_dropout > 0


def encoder_states_of(
    hidden_states: Tensor,
    tokens: Tokens,
    tp_group: Group,
    *,
    sequence_parallel: bool = False,
    attention_mask: Tensor | None = None,
    dropout: DropoutTokens | None = None,
) -> EncoderStates:
    """Returns the inputs of cross attention for the encoder's output [s, b, h]. Under sequence parallelism this gathers
    every rank's part, [s / ranks, b, h], once for all layers. Backward sums the gradient of all layers over the tensor
    parallel ranks in one collective."""
    if group_size(tp_group) > 1:
        gather = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
        hidden_states = gather(hidden_states, group=tp_group)
    return EncoderStates(hidden_states.flatten(0, 1), tokens, attention_mask, dropout)


def plain_causal_mask(shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns a mask, bool [b, 1, s, s], that hides only later tokens (True: hidden). The mask is marked, so that
    causal layers can skip it (`is_plain_causal`)."""
    mask = torch.ones(shape[-1], shape[-1], dtype=torch.bool, device=device).triu(diagonal=1).expand(*shape)
    if not mask.is_inference():
        mask.plain_at_version = mask._version  # type: ignore[attr-defined]
    return mask


def is_plain_causal(mask: Tensor | None) -> bool:
    """Whether `plain_causal_mask` made the mask and it has not changed since."""
    version = getattr(mask, "plain_at_version", None)
    return mask is not None and version is not None and bool(mask._version == version)


def check_scanned_inputs(inputs: LayerInputs, layers: str) -> None:
    """Raises UserError for inputs that recurrent layers do not support. `layers` names the layers."""
    if inputs.attention_mask is not None and not is_plain_causal(inputs.attention_mask):
        raise UserError(
            f"{layers} layers cannot follow an attention_mask, because their state passes through all tokens of a row; "
            "give documents as packed sequences (cu_seqlens) instead"
        )


def as_heads(tensor: Tensor, tokens: Tokens, heads: int) -> Tensor:
    """Views [t, heads * d] as [s, b, heads, d]."""
    return tensor.view(tokens.seq_length, tokens.batch_size, heads, -1)


def takes_inputs(module: nn.Module) -> bool:
    """Whether the `forward` of a module has the parameter `inputs`, for `LayerInputs`."""
    kind: Any = type(module)
    return "inputs" in Keywords.of_forward(kind).names


def is_script_layer(layer: nn.Module) -> bool:
    """Whether a layer is of a script's class, which is called as in Megatron-LM (`layer_call.run_script_layer`): its
    `forward` takes `attention_mask` or any keyword, but no `inputs`."""
    kind: Any = type(layer)
    return not takes_inputs(layer) and "attention_mask" in Keywords.of_forward(kind)
