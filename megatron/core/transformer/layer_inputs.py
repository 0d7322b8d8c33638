"""What travels with the hidden states through the layers of a model; made once a micro-batch on each stage."""

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
    """Keys and values [sk, b, g, d] that the tokens at hand may look at."""

    key: Tensor
    value: Tensor
    query_positions: Tensor | None
    """int64 [b, s]: which key each of the tokens stands at; None: they are the last ones."""


class InferenceContext(Protocol):
    """Keys and values of the tokens that were seen before, while a model writes."""

    max_sequence_length: int
    """Tokens of the longest row that it can hold."""

    def extend(self, layer_number: int, key: Tensor, value: Tensor) -> CachedKeyValues:
        """Add the keys and values [s, b, g, d] that a layer has for the tokens at hand."""

    def select_last(self, hidden: Tensor) -> Tensor:
        """Of hidden states [s, b, h], those from which each row's next token is predicted: [1, b, h]."""


@dataclass(frozen=True)
class LayerInputs:
    """Everything a layer needs beside the hidden states [t, h]: a layer is a pure function of the two."""

    tokens: Tokens
    rotation: Rotation | None = None
    """Rotary positions of these tokens; None: the model has none."""
    local_rotation: Rotation | None = None
    """The same of layers in which `window_size` holds; None: as all others."""
    query_scale: Tensor | None = None
    """Factor of the queries of these tokens in layers without rotary positions, [s, b or 1, 1, 1]; None: 1."""
    attention_mask: Tensor | None = None
    """bool, broadcasts to [b, heads, s, s]; True hides a key, beside what the layer's own rule hides."""
    dropout: DropoutTokens | None = None
    """Of all these tokens, as attention sees them; None: nothing is dropped."""
    hidden_dropout: DropoutTokens | None = None
    """Of the tokens whose hidden states this rank holds; None: of all of them."""
    inference_context: InferenceContext | None = None
    auxiliary_scale: Tensor | None = None
    """Gradient of every loss that a layer adds to the model's (see `ops.attached_loss`): a scalar on the device; None:
    1."""
    turn: CooperativeTurn | None = None
    """None: no other micro-batch shares this process's time."""

    def dropout_position(self, layer_number: int, site: str) -> DropoutRngPosition | None:
        """Where dropout of all tokens stands in the run, at one site of one layer (counted from 1)."""
        return None if self.dropout is None else DropoutRngPosition(self.dropout, layer_number, site)

    def hidden_dropout_position(self, layer_number: int, site: str) -> DropoutRngPosition | None:
        """As `dropout_position`, for the hidden states that this rank holds."""
        dropout = self.hidden_dropout or self.dropout
        return None if dropout is None else DropoutRngPosition(dropout, layer_number, site)


def sequence_slice(dropout: DropoutTokens | None, group: Group) -> DropoutTokens | None:
    """The part of the tokens whose hidden states a rank of a sequence parallel group holds: they are cut evenly, as
    they lie in [t, h]."""
    if dropout is None:
        return None
    return dataclasses.replace(dropout, index=dropout.index.chunk(group_size(group))[group_rank(group)])


def as_heads(tensor: Tensor, tokens: Tokens, heads: int) -> Tensor:
    """[t, heads * d] -> [s, b, heads, d], a view."""
    return tensor.view(tokens.seq_length, tokens.batch_size, heads, -1)
