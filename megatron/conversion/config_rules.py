"""Rules that translate between keys of config.json and fields of our configs. A family is a list of rules.

A rule names the keys that it reads. `fields(config)` returns our values by field name; `keys(values)` returns the keys
for all values of a run. `config` always has a value for each key of `hub_defaults.toml`. If a family cannot express a
value, `keys` may leave it out: an export reads its keys back and compares, so it notices everything that is lost.

Errors of rules begin with the key; the caller adds the name of the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.conversion.hub_defaults import Json
from megatron.core.exceptions import UserError

Values = Mapping[str, Any]


class Rule:
    """Translates some keys of config.json to fields and back. A subclass overrides what it does not leave empty."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys that the rule reads: its `key`, if it has one."""
        return (self.key,) if hasattr(self, "key") else ()

    def fields(self, config: Json) -> dict[str, object]:
        """Returns our values by field name. Raises UserError naming key and value if we cannot express them."""
        return {}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the keys that express these values, as far as the family can express them."""
        return {}

    def note(self, config: Json) -> str | None:
        """Returns a sentence if config.json has a value without effect; an import prints it."""
        return None


def checked_types(config: Json, key: str, known: Sequence[str], supported: str) -> list[str]:
    """Returns the list of `key`, an entry for each layer. Raises UserError for another length, and for entries that
    are not `known`, with the sentence part `supported`."""
    kinds, count = list(config[key]), config["num_hidden_layers"]
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise UserError(f"{key} has {unknown[0]!r}; {supported} are supported")
    if len(kinds) != count:
        raise UserError(f"{key} has {len(kinds)} entries, but num_hidden_layers is {count}")
    return kinds


def layers_of(pattern: Sequence[int]) -> int | list[int]:
    """Returns the value of --moe-layer-freq for a 1 or 0 of each layer."""
    return 1 if all(pattern) else list(pattern)


@dataclass(frozen=True)
class Copied(Rule):
    """A key whose value is the value of one field."""

    key: str
    field: str
    also: str = ""
    """Second name of the key. It is written too, because releases of transformers read one or the other."""
    unset: Json = None
    """Value of the key where the field is not set."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the key's value."""
        return {self.field: config[self.key]}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the field's value under each name of the key."""
        value = self.unset if values[self.field] is None else values[self.field]
        return dict.fromkeys((self.key, self.also) if self.also else (self.key,), value)


def copied(*same: str, **fields: str) -> tuple[Copied, ...]:
    """Returns a rule for each key whose value is that of the field of the same name, or of `fields`, by key."""
    return tuple(Copied(key, field) for key, field in (*zip(same, same, strict=True), *fields.items()))


@dataclass(frozen=True)
class Switch(Rule):
    """A key that is true if fields have these values, and false if they have their defaults."""

    key: str
    values: Values

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns the values if the key is true."""
        return dict(self.values) if config[self.key] else {}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns whether all fields have these values."""
        return {self.key: all(values[field] == value for field, value in self.values.items())}


@dataclass(frozen=True)
class Fixed(Rule):
    """A key of which only one value is supported."""

    key: str
    value: Json
    write: bool = True
    """Whether exports write the key."""
    also: tuple[Json, ...] = ()
    """Other values that mean the same."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns nothing. Raises UserError for any other value."""
        found = config.get(self.key, self.value)
        if found != self.value and found not in self.also:
            raise UserError(f"{self.key} is {found!r}; only {self.value!r} is supported")
        return {}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the one value."""
        return {self.key: self.value} if self.write else {}


def fixed(**values: Json) -> tuple[Fixed, ...]:
    """Returns a rule for each key of which only one value is supported."""
    return tuple(Fixed(key, value) for key, value in values.items())


@dataclass(frozen=True)
class Unused(Rule):
    """Keys that do not change what the model computes."""

    unused: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        return self.unused


@dataclass(frozen=True)
class NotApplied(Rule):
    """A key that the class of transformers accepts and does not apply. An import says so if it is set."""

    key: str

    def note(self, config: Json) -> str | None:
        """Returns a sentence if the key is set."""
        if config.get(self.key) is None:
            return None
        return f"{self.key} is {config[self.key]}, which transformers does not apply: imported without it"


@dataclass(frozen=True)
class Inverse(Rule):
    """A key whose value is 1 / the value of one field."""

    key: str
    field: str

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the inverse of the key's value."""
        if not config[self.key] > 0:
            raise UserError(f"{self.key} is {config[self.key]}; it must be larger than 0")
        return {self.field: 1.0 / config[self.key]}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the inverse of the field's value."""
        return {self.key: 1.0 / values[self.field]}


@dataclass(frozen=True)
class Implied(Rule):
    """Fields that are the same for every model of the family. No key says them."""

    values: Values

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the family's values."""
        return dict(self.values)


@dataclass(frozen=True)
class Written(Rule):
    """Keys that do not change what the model computes, and that exports write all the same."""

    values: Mapping[str, Json]

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the keys."""
        return dict(self.values)


@dataclass(frozen=True)
class TiedEmbeddings(Rule):
    """Whether the output layer uses the weight of the embedding."""

    reads = ("tie_word_embeddings",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the opposite switch."""
        return {"untie_embeddings_and_output_weights": not config["tie_word_embeddings"]}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the opposite of our switch."""
        return {"tie_word_embeddings": not values["untie_embeddings_and_output_weights"]}
