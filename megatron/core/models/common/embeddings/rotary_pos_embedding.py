"""Positions of tokens in attention: rotary embeddings by the model's settings, and scales of queries."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.ops.rope import Rotation
from megatron.core.ops.rope_frequencies import (
    RopeScaling,
    frequencies_of_length,
    scaled_frequencies,
    yarn_concentration,
)
from megatron.core.tokens import Tokens, row_lengths
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RotaryEmbedding(nn.Module):
    """Computes angles position * base^(-2i/r) for i < r/2. r = kv_channels * rotary_percent is the number of rotated
    channels of a head. Angles are float32, as in the published models.

    `seq_len_interpolation_factor` divides the positions. `rope_scaling` stretches low frequencies by
    `rope_scaling_factor`, as in Llama 3.1; our own keyword `scaling` describes any known kind of scaling.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group = None,
        *,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        self.rotary_dim = kv_channels if rotary_percent >= 1.0 else int(kv_channels * rotary_percent)
        self.rotary_base, self.rotary_interleaved = rotary_base, rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        if scaling is None and rope_scaling:
            scaling = RopeScaling("llama3", rope_scaling_factor)
        self.scaling = scaling
        if scaling is not None:
            _check_channels(scaling, self.rotary_dim)
        # Neither parameter nor buffer: a cast of the model to half precision leaves it alone.
        self._inverse_frequency = {"cpu": scaled_frequencies(self.rotary_dim, rotary_base, scaling)}

    def inverse_frequency(self, device: torch.device) -> Tensor:
        """Returns radians per position, float32 [r / 2]; cached by device. If frequencies depend on the row length,
        returns those of short rows."""
        key = str(device)
        if key not in self._inverse_frequency:
            self._inverse_frequency[key] = self._inverse_frequency["cpu"].to(device)
        return self._inverse_frequency[key]

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Returns the angles of `max_seq_len` positions from `offset` on, float32 [max_seq_len, r / 2]."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        position = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=device)
        if self.seq_len_interpolation_factor is not None:
            position = position * (1.0 / self.seq_len_interpolation_factor)
        return torch.outer(position, self.inverse_frequency(device))

    def get_cos_sin(self, max_seq_len: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of `get_freqs_non_repeated`."""
        angle = self.get_freqs_non_repeated(max_seq_len, offset)
        return angle.cos(), angle.sin()

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Returns the angles of positions from `offset` on, each twice, for `rope_utils.apply_rotary_pos_emb`: float32
        [max_seq_len, 1, 1, r]."""
        angle = self.get_freqs_non_repeated(max_seq_len, offset)
        twice = angle.repeat_interleave(2, dim=-1) if self.rotary_interleaved else torch.cat([angle, angle], dim=-1)
        return twice[:, None, None, :]

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor | None,
        transformer_config: "TransformerConfig",
        packed_seq_params: Any = None,
        inference_params: Any = None,
    ) -> int:
        """Returns the number of positions that a layer needs, for hidden states [s, b, h] of this rank, or for an
        inference context."""
        context = inference_context or inference_params
        if context is not None:
            return int(context.max_sequence_length)
        if packed_seq_params is not None:
            return int(max(packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv))
        if transformer_input is None:
            transformer_input = transformer.input_tensor
        length = int(transformer_input.shape[0])
        if transformer_config.sequence_parallel:
            length *= transformer_config.tensor_model_parallel_size
        return length * int(transformer_config.context_parallel_size)

    def forward(self, positions: Any, tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Returns the rotation of each token for positions int64 [b or 1, s]: cosines and sines, float32 [s, b or 1, 1,
        r / 2]. `tokens` gives the lengths of rows and packed documents; without it a row ends at its largest position.
        For a number of positions and an offset (Megatron-LM's call) it returns `get_emb`."""
        if isinstance(positions, int):
            return self.get_emb(positions, tokens or 0)
        return self._rotation(positions, tokens)

    def _rotation(self, positions: Tensor, tokens: Tokens | None) -> Rotation:
        position = positions.t().to(torch.float32)[:, :, None, None]  # [s, b, 1, 1]
        if self.seq_len_interpolation_factor is not None:
            position = position * (1.0 / self.seq_len_interpolation_factor)
        if self.scaling is not None and self.scaling.depends_on_length:
            lengths = positions.amax(1, keepdim=True) + 1 if tokens is None else row_lengths(tokens, positions.device)
            lengths = lengths.t()[:, :, None, None]  # [s or 1, b or 1, 1, 1]
            angle = position * frequencies_of_length(self.rotary_dim, self.rotary_base, self.scaling, lengths)
        else:
            angle = position * self.inverse_frequency(positions.device)
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        if amplitude == 1.0:
            return Rotation(angle.cos(), angle.sin(), self.rotary_interleaved)
        return Rotation(angle.cos() * amplitude, angle.sin() * amplitude, self.rotary_interleaved)

    def check_cache(self, max_sequence_length: int) -> None:
        """Raises UserError if generated rows can become longer than the frequencies allow. If frequencies depend on the
        row length, cached keys would keep the frequencies of the shorter row."""
        scaling = self.scaling
        if scaling is not None and scaling.depends_on_length and max_sequence_length > scaling.original_length:
            raise UserError(
                f"rope_scaling_type {scaling.kind}: an inference context of {max_sequence_length} tokens is longer "
                f"than {scaling.original_length} (rope_scaling_original_length), beyond which frequencies change as a "
                "row grows; make it no longer than that"
            )


def rope_scaling_of(config: "TransformerConfig", factor: float, llama3: bool = False) -> RopeScaling | None:
    """Returns the rotary scaling of a TransformerConfig. `llama3` is Megatron-LM's argument that selects Llama 3's
    scaling."""
    kind = config.rope_scaling_type
    if llama3 and kind not in (None, "llama3"):
        raise UserError(f"rope_scaling asks for llama3, rope_scaling_type for {kind}; give one of them")
    if kind is None and not llama3:
        return None
    return RopeScaling(
        kind or "llama3",
        factor,
        config.rope_scaling_original_length,
        low_freq_factor=config.rope_scaling_low_freq_factor,
        high_freq_factor=config.rope_scaling_high_freq_factor,
        beta_fast=config.rope_scaling_beta_fast,
        beta_slow=config.rope_scaling_beta_slow,
        truncate=config.rope_scaling_truncate,
        short_factor=tuple(config.rope_scaling_short_factor or ()),
        long_factor=tuple(config.rope_scaling_long_factor or ()),
        attention_factor=config.rope_scaling_attention_factor,
    )


def _check_channels(scaling: RopeScaling, rotary_dim: int) -> None:
    """Raises UserError if a list of divisors does not fit the number of rotated channels."""
    for name, numbers in (("short", scaling.short_factor), ("long", scaling.long_factor)):
        if scaling.kind == "longrope" and len(numbers) != rotary_dim // 2:
            raise UserError(
                f"rope_scaling_{name}_factor has {len(numbers)} numbers; {rotary_dim} channels of a head are rotated, "
                f"which needs {rotary_dim // 2}"
            )
    if scaling.kind == "dynamic" and rotary_dim <= 2:
        raise UserError(f"rope_scaling_type dynamic: {rotary_dim} channels of a head are rotated; it needs 4 at least")


@dataclass(frozen=True)
class Positions:
    """The arguments of a model that describe positions."""

    kind: str
    """`position_embedding_type`"""
    rotary_percent: float = 1.0
    rotary_base: float = 10000
    interpolation: float | None = None
    """`seq_len_interpolation_factor`"""
    rope_scaling: bool = False
    rope_scaling_factor: float = 1.0


def choose_rotary_embeddings(
    config: TransformerConfig, positions: Positions
) -> tuple[RotaryEmbedding | None, RotaryEmbedding | None]:
    """Returns the rotary embedding of the model, or None, and the separate one of windowed layers, or None if they have
    the same frequencies. Latent attention takes all settings from the config."""
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        return latent_rotary_embedding(config), None
    if positions.kind != "rope":
        return None, None
    assert config.kv_channels is not None
    scaling = rope_scaling_of(config, positions.rope_scaling_factor, llama3=positions.rope_scaling)
    shape = config.kv_channels, positions.rotary_percent, config.rotary_interleaved
    rotary = RotaryEmbedding(*shape, positions.interpolation, positions.rotary_base, scaling=scaling)
    if config.rotary_base_local is None or config.window_size is None:
        return rotary, None
    return rotary, RotaryEmbedding(*shape, rotary_base=config.rotary_base_local)


def latent_rotary_embedding(config: MLATransformerConfig) -> RotaryEmbedding:
    """Returns the rotary embedding of the `qk_pos_emb_head_dim` rotary channels of a head; with `rope_type` yarn for
    rows that are `rotary_scaling_factor` times as long as `original_max_position_embeddings`. Neighbouring pairs of
    channels are rotated. (Published models put the even channels of a head before the odd ones and rotate halves. This
    holds for queries and keys, so the products are equal.)"""
    scaling = None
    if config.rope_type == "yarn":
        factor = config.rotary_scaling_factor
        scaling = RopeScaling(
            "yarn",
            factor,
            config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            attention_factor=yarn_concentration(factor, config.mscale, config.mscale_all_dim),
        )
    return RotaryEmbedding(
        config.qk_pos_emb_head_dim,
        config.rotary_percent,
        rotary_interleaved=True,
        rotary_base=config.rotary_base,
        scaling=scaling,
    )


def query_scale(config: "TransformerConfig", positions: Tensor) -> Tensor | None:
    """Returns the factor of queries in layers without rotary positions, by the config's `nope_temperature_scale`:
    positions int64 [b or 1, s] -> float32 [s, b or 1, 1, 1]. None: 1."""
    scale = config.nope_temperature_scale
    if scale is None:
        return None
    steps = torch.floor((positions.t().to(torch.float32) + 1.0) / config.nope_temperature_floor)
    return (torch.log1p(steps) * scale + 1.0)[:, :, None, None]
