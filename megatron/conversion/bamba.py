"""Bamba: each layer is a Mamba-2 or attention layer followed by an MLP. These are two layers of our hybrid pattern."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import EMBEDDING as WORDS
from megatron.conversion.family import HEAD, Family
from megatron.conversion.hub_defaults import DECODER_DEFAULTS, Json
from megatron.conversion.mamba import MIXER, StepLimits, mamba_layer
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import TensorMapping
from megatron.core.exceptions import UserError
from megatron.core.transformer.config.hybrid import mamba_heads
from megatron.core.transformer.layer_patterns import hybrid_letters

_ENDS = {
    "embedding.word_embeddings.weight": WORDS,
    "decoder.final_layernorm.weight": "model.final_layernorm.weight",
    "output_layer.weight": HEAD,
}
_MIXER_NORM = one_to_one({f"{OURS}.input_layernorm.weight": f"{HUB}.input_layernorm.weight"})
_ATTENTION = decoder.ATTENTION | decoder.QKV_BIAS | decoder.OUTPUT_BIAS | _MIXER_NORM
_MLP = decoder.gated(f"{OURS}.mlp", f"{HUB}.feed_forward", "gate_proj", "up_proj", "down_proj") | one_to_one(
    {f"{OURS}.pre_mlp_layernorm.weight": f"{HUB}.pre_ff_layernorm.weight"}
)


def _mixers(values: rules.Values) -> str:
    """Returns the letters of the layers that mix tokens; nothing unless an MLP follows each of them."""
    letters = hybrid_letters(run_of(values)) or ""
    mixers = letters[::2]
    return mixers if letters == "".join(f"{mixer}-" for mixer in mixers) and set(mixers) <= {"M", "*"} else ""


def _tensors(values: rules.Values) -> TensorMapping:
    """Returns the table, layer by layer; nothing for a model of another form."""
    mixers = _mixers(values)
    mamba = mamba_layer(values) | _MIXER_NORM if "M" in mixers else {}
    tensors = dict(one_to_one(_ENDS)) if mixers else {}
    for number, mixer in enumerate(mixers):
        tensors |= _of_layer(mamba if mixer == "M" else _ATTENTION, 2 * number, number)
        tensors |= _of_layer(_MLP, 2 * number + 1, number)
    return tensors


def _of_layer(table: decoder.Mapping, ours: int, theirs: int) -> decoder.Mapping:
    """Returns the table of one layer, which has another number on each side."""
    hub = HUB.format(layer=theirs)
    return {
        name.replace(OURS, OURS.format(layer=ours)): tuple(
            dataclasses.replace(pattern, name=pattern.name.replace(MIXER, f"{hub}.mamba").replace(HUB, hub))
            for pattern in patterns
        )
        for name, patterns in table.items()
    }


@dataclass(frozen=True)
class LayersInPairs(rules.Rule):
    """The layers with attention; the others are Mamba-2 layers."""

    reads = ("num_hidden_layers", "attn_layer_indices")

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns the pattern, with an MLP behind each letter."""
        count, attention = config["num_hidden_layers"], config["attn_layer_indices"] or []
        pattern = "".join("*-" if layer in attention else "M-" for layer in range(count))
        return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        mixers = _mixers(values)
        attention = [layer for layer, mixer in enumerate(mixers) if mixer == "*"]
        return {"num_hidden_layers": len(mixers), "attn_layer_indices": attention}


@dataclass(frozen=True)
class HeadsOfMamba(rules.Rule):
    """Heads of a Mamba-2 layer, whose channels are a multiple of the hidden size."""

    reads = ("mamba_n_heads", "mamba_d_head", "mamba_expand")

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns number and width. Raises UserError if the keys contradict each other."""
        heads, width, expand = (config[key] for key in self.reads)
        channels = expand * config["hidden_size"]
        width = channels // heads if width == "auto" else width
        if not isinstance(width, int) or heads * width != channels:
            raise UserError(
                f"mamba_d_head is {width!r}; with mamba_n_heads {heads} it must be mamba_expand * hidden_size / "
                f"mamba_n_heads (--mamba-num-heads, --mamba-head-dim), {channels} / {heads}"
            )
        return {"mamba_num_heads": heads, "mamba_head_dim": width}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        heads, width = mamba_heads(run_of(values)), values["mamba_head_dim"]
        return dict(zip(self.reads, (heads, width, heads * width // values["hidden_size"]), strict=True))


BAMBA_FAMILY = Family(
    "BambaForCausalLM",
    "bamba",
    _tensors,
    (
        *(rule for rule in decoder.SIZES if rule.reads != ("num_hidden_layers",)),
        *decoder.SWIGLU,
        decoder.EPSILON,
        LayersInPairs(),
        HeadsOfMamba(),
        StepLimits(),
        layer_rules.AttentionHeads(),
        layer_rules.LinearBiases(),
        RotaryPositions(rotated_part=0.5),
        rules.Copied("mamba_n_groups", "mamba_num_groups"),
        rules.Copied("mamba_d_state", "mamba_state_dim"),
        rules.Copied("mamba_d_conv", "mamba_conv_kernel_dim"),
        rules.Fixed("mamba_conv_bias", True),
        rules.Fixed("mamba_proj_bias", False),
        rules.Unused(("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")),
        rules.Unused(("layers_block_type", "layer_types", "use_mamba_kernels")),
    ),
    defaults=DECODER_DEFAULTS
    | {
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "attn_layer_indices": None,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, float("inf")),
        "mlp_bias": False,
    },
)
