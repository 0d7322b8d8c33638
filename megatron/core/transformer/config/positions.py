"""Positional information: scaling of rotary frequencies, ALiBi, and queries scaled by position."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.declarations.config_fields import flag, not_a_flag

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(kw_only=True)
class PositionConfig:
    """Positional information of attention, in addition to GPTModel's own arguments."""

    rope_scaling_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] | None = flag(
        None, only_with="position_embedding_type=rope"
    )
    """With rope: how frequencies are scaled for rows longer than the original training length: all by one factor
    (linear), by a base that grows with the row (dynamic), by wavelength (llama3, yarn), or each by its own divisor
    (longrope)."""

    rope_scaling_original_length: int = flag(
        8192, only_with="use_rope_scaling", or_with="rope_scaling_type=dynamic|llama3|yarn|longrope"
    )
    """Rope scaling: row length of the original training."""

    rope_scaling_low_freq_factor: float = flag(1.0, only_with="use_rope_scaling", or_with="rope_scaling_type=llama3")
    """Scaling llama3: frequencies with fewer wavelengths than this in the original length are divided by the factor."""

    rope_scaling_high_freq_factor: float = flag(4.0, only_with="use_rope_scaling", or_with="rope_scaling_type=llama3")
    """Scaling llama3: frequencies with more wavelengths than this in the original length are not changed."""

    rope_scaling_beta_fast: float = flag(32.0, only_with="rope_scaling_type=yarn")
    """Scaling yarn: frequencies with more wavelengths than this in the original length are not changed."""

    rope_scaling_beta_slow: float = flag(1.0, only_with="rope_scaling_type=yarn")
    """Scaling yarn: frequencies with fewer wavelengths than this in the original length are divided by the factor."""

    rope_scaling_truncate: bool = flag(
        True,
        off="--no-rope-scaling-truncate",
        off_help="Scaling yarn: do not round the range of channels between these two to whole channels.",
        only_with="rope_scaling_type=yarn",
    )
    """Scaling yarn: the range of channels between these two is rounded outwards to whole channels."""

    rope_scaling_short_factor: list[float] | None = flag(None, only_with="rope_scaling_type=longrope")
    """Scaling longrope: divisors of the frequencies in rows up to the original length, one per pair of rotated
    channels."""

    rope_scaling_long_factor: list[float] | None = flag(None, only_with="rope_scaling_type=longrope")
    """Scaling longrope: divisors of the frequencies in longer rows."""

    rope_scaling_attention_factor: float | None = flag(None, only_with="rope_scaling_type")
    """Factor of cosines and sines. Default: 0.1 ln(factor) + 1 for yarn, sqrt(1 + ln(factor) / ln(original length)) for
    longrope, else 1."""

    rotary_base_local: float | None = flag(None, only_with=("window_size", "position_embedding_type=rope"))
    """With --window-size: base of the rotary frequencies in layers with a window; these are not scaled. Default: the
    base of all layers."""

    alibi: bool = False
    """ALiBi: attention scores fall linearly with the distance of query and key, each head at its own rate (Press et al.
    2022). Needs --position-embedding-type none."""

    alibi_factor: float = flag(1.0, only_with="alibi")
    """With --alibi: factor of the rates 2^(-8 i / heads)."""

    relative_bias: bool = not_a_flag(False)
    """Self-attention adds a bias to its scores. The model computes the bias from relative positions; a model with
    position_embedding_type relative sets this field for its layers."""

    nope_temperature_scale: float | None = flag(None, only_with="no_rope_freq")
    """With --no-rope-freq: in layers without rotary positions, multiply the query at position p by 1 + scale * ln(1 +
    floor((p + 1) / --nope-temperature-floor))."""

    nope_temperature_floor: int = flag(8192, only_with="nope_temperature_scale")
    """With --nope-temperature-scale: number of tokens over which the factor stays the same."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value of `PositionConfig`; `config` has the fields of TransformerConfig."""
    for name in ("original_length", "low_freq_factor", "beta_fast", "beta_slow"):
        if not getattr(config, f"rope_scaling_{name}") > 0:
            yield f"{{rope_scaling_{name}}} must be larger than 0"
    if not config.rope_scaling_high_freq_factor >= config.rope_scaling_low_freq_factor:
        yield "{rope_scaling_high_freq_factor} must be at least {rope_scaling_low_freq_factor}"
    if not config.rope_scaling_beta_fast > config.rope_scaling_beta_slow:
        yield "{rope_scaling_beta_fast} must be larger than {rope_scaling_beta_slow}"
    if config.rope_scaling_attention_factor is not None and not config.rope_scaling_attention_factor > 0:
        yield "{rope_scaling_attention_factor} must be larger than 0"
    if config.alibi and not config.alibi_factor > 0:
        yield "{alibi_factor} must be larger than 0"
    if config.nope_temperature_floor < 1:
        yield "{nope_temperature_floor} must be at least 1"
    if config.nope_temperature_scale is not None and config.no_rope_freq is None:
        yield "{nope_temperature_scale} needs {no_rope_freq:name}, which selects the layers without rotary positions"
    if config.rotary_base_local is not None and not config.rotary_base_local > 0:
        yield "{rotary_base_local} must be larger than 0"
    yield from _longrope_problems(config)


def _longrope_problems(config: "TransformerConfig") -> Iterator[str]:
    short, long = config.rope_scaling_short_factor, config.rope_scaling_long_factor
    if config.rope_scaling_type != "longrope":
        return
    if not short or not long:
        yield "{rope_scaling_type} needs {rope_scaling_short_factor:name} and {rope_scaling_long_factor:name}"
        return
    if len(short) != len(long):
        yield (
            f"{{rope_scaling_short_factor:name}} has {len(short)} numbers, {{rope_scaling_long_factor:name}} "
            f"{len(long)}; both need one for each pair of rotated channels"
        )
    for name, numbers in (("short", short), ("long", long)):
        if not all(number > 0 for number in numbers):
            yield f"{{rope_scaling_{name}_factor}}: every number must be larger than 0"
