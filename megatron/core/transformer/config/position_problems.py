"""What is wrong with a config's positions."""

from collections.abc import Iterator
from typing import Any


def position_problems(config: Any) -> Iterator[str]:
    """A problem for each value of `PositionConfig` that says nothing sensible; `config` has the fields of
    TransformerConfig."""
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
        yield "{nope_temperature_scale} needs {no_rope_freq:name}, which says what layers have no rotary positions"
    if config.rotary_base_local is not None and not config.rotary_base_local > 0:
        yield "{rotary_base_local} must be larger than 0"
    yield from _longrope_problems(config)


def _longrope_problems(config: Any) -> Iterator[str]:
    short, long = config.rope_scaling_short_factor, config.rope_scaling_long_factor
    if config.rope_scaling_type != "longrope":
        return
    if not short or not long:
        yield "{rope_scaling_type} needs {rope_scaling_short_factor:name} and {rope_scaling_long_factor:name}"
        return
    if len(short) != len(long):
        yield (
            f"{{rope_scaling_short_factor:name}} has {len(short)} numbers, {{rope_scaling_long_factor:name}} "
            f"{len(long)}; both have one for each pair of channels that is turned"
        )
    for name, numbers in (("short", short), ("long", long)):
        if not all(number > 0 for number in numbers):
            yield f"{{rope_scaling_{name}_factor}}: every number must be larger than 0"
