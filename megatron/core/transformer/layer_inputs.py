"""Inputs of the layers besides the hidden states; built once per micro-batch on each stage."""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.dropout.dropout import DropoutRngPosition, DropoutTokens
from megatron.core.ops.rope import Rotation
from megatron.core.tokens import Tokens


@dataclass(frozen=True)
class CachedKeyValues:
    """Keys and values [sk, b, g, d] that the current tokens attend to."""

    key: Tensor
    value: Tensor
    query_positions: Tensor | None
    """int64 [b, s]: index of the key at which each token stands; None: the tokens are the last keys."""


class InferenceContext(Protocol):
    """A cache of the keys and values of earlier tokens, for text generation."""

    max_sequence_length: int
    """Number of tokens of the longest row that the cache can hold."""

    def extend(self, layer_number: int, key: Tensor, value: Tensor) -> CachedKeyValues:
        """Adds the keys and values [s, b, g, d] of the current tokens for a layer. Returns all that the tokens attend
        to."""

    def select_last(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states [1, b, h] of hidden states [s, b, h] from which each row's next token is
        predicted."""


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer besides the hidden states [t, h]. A layer is a pure function of the two."""

    tokens: Tokens
    rotation: Rotation | None = None
    """Rotary positions of these tokens; None: the model has no rotary positions."""
    local_rotation: Rotation | None = None
    """Rotary positions in layers with a `window_size`; None: the same as in all layers."""
    query_scale: Tensor | None = None
    """Factor of the queries in layers without rotary positions, [s, b or 1, 1, 1]; None: 1."""
    attention_mask: Tensor | None = None
    """bool, broadcasts to [b, heads, s, s]; True hides a key, in addition to the layer's own mask."""
    dropout: DropoutTokens | None = None
    """Random positions of all these tokens, for attention; None: no dropout."""
    hidden_dropout: DropoutTokens | None = None
    """Random positions of the tokens whose hidden states this rank holds; None: those of all tokens."""
    inference_context: InferenceContext | None = None
    auxiliary_scale: Tensor | None = None
    """Gradient of every loss that a layer adds to the model's loss (see `ops.attached_loss`): a scalar on the device;
    None: 1."""
    turn: CooperativeTurn | None = None
    """Set if another micro-batch takes turns with this one."""

    def dropout_position(self, layer_number: int, site: str) -> DropoutRngPosition | None:
        """Returns the random position of all tokens at one dropout site of one layer (counted from 1); None: no
        dropout."""
        return None if self.dropout is None else DropoutRngPosition(self.dropout, layer_number, site)

    def hidden_dropout_position(self, layer_number: int, site: str) -> DropoutRngPosition | None:
        """Returns the random position of the hidden states that this rank holds; see `dropout_position`."""
        dropout = self.hidden_dropout or self.dropout
        return None if dropout is None else DropoutRngPosition(dropout, layer_number, site)


def sequence_slice(dropout: DropoutTokens | None, group: Group) -> DropoutTokens | None:
    """Returns the part of the tokens whose hidden states a rank of a sequence parallel group holds: equal parts of [t,
    h], in memory order."""
    if dropout is None:
        return None
    return dataclasses.replace(dropout, index=dropout.index.chunk(group_size(group))[group_rank(group)])


def as_heads(tensor: Tensor, tokens: Tokens, heads: int) -> Tensor:
    """Views [t, heads * d] as [s, b, heads, d]."""
    return tensor.view(tokens.seq_length, tokens.batch_size, heads, -1)
