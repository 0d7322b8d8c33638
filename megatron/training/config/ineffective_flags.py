"""Notes about flags that were given and change nothing, or not what their name suggests."""

from collections.abc import Iterator

from megatron.training.config.conditions import lacking, needs_of, ways_of
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.ineffective_values import RULES
from megatron.training.config.model_families import NAMES
from megatron.training.config.settings import Settings


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
