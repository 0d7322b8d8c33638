"""SmolLM3: a decoder like Llama in which some layers have no positions."""

from dataclasses import dataclass
from typing import Any

from megatron.conversion import decoder, layer_rules
from megatron.conversion.config_rules import Rule, Values
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import run_of
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_rope


@dataclass(frozen=True)
class LayersWithoutPositions(Rule):
    """Layers without rotary positions: those with a 0 in `no_rope_layers`; without the list every
    `no_rope_layer_interval`-th one."""

    reads = ("no_rope_layers", "no_rope_layer_interval")

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns the layers."""
        rotated, interval, count = (config[key] for key in (*self.reads, "num_hidden_layers"))
        if not rotated:
            rotated = [int(layer % interval != 0) for layer in range(1, count + 1)]
        if len(rotated) != count:
            raise UserError(f"no_rope_layers has {len(rotated)} entries, but num_hidden_layers is {count}")
        return {} if all(rotated) else {"no_rope_freq": [1 - int(bool(layer)) for layer in rotated]}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the list."""
        config = run_of(values)
        return {"no_rope_layers": [int(has_rope(config, layer)) for layer in range(1, values["num_layers"] + 1)]}


SMOLLM3_FAMILY = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    decoder.LLAMA,
    (
        *decoder.DECODER,
        layer_rules.ATTENTION_BIASES,
        layer_rules.MLP_BIASES,
        layer_rules.SlidingWindows(by_layer=True),
        LayersWithoutPositions(),
    ),
)
