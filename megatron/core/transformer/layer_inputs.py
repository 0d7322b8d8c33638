"""What travels with the hidden states through the layers of a model; made once a micro-batch on each stage."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.ops.dropout import DropoutPlace, DropoutTokens
from megatron.core.ops.rope import Rotation
from megatron.core.tokens import Tokens


class KeyValueCache(Protocol):
    """Keys and values of the tokens that were seen before, while a model writes."""

    def extend(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the keys and values [s, b, g, d] of these tokens. Gives all that they may see, [sk, b, g, d], and the
        mask (True hides) that goes with it; None: the causal rule alone."""


@dataclass(frozen=True)
class LayerInputs:
    """Everything a layer needs beside the hidden states [t, h]: a layer is a pure function of the two."""

    tokens: Tokens
    rotation: Rotation | None = None
    """Rotary positions of these tokens; None: the model has none."""
    attention_mask: Tensor | None = None
    """bool, broadcasts to [b, heads, s, s]; True hides a key, beside what the layer's own rule hides."""
    dropout: DropoutTokens | None = None
    """None: nothing is dropped."""
    cache: KeyValueCache | None = None

    def dropout_place(self, layer_number: int, site: str) -> DropoutPlace | None:
        """Where dropout stands in the run, at one site of one layer (counted from 1)."""
        return None if self.dropout is None else DropoutPlace(self.dropout, layer_number, site)


def as_heads(tensor: Tensor, tokens: Tokens, heads: int) -> Tensor:
    """[t, heads * d] -> [s, b, heads, d], a view."""
    return tensor.view(tokens.seq_length, tokens.batch_size, heads, -1)
