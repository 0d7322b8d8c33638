"""Bamba: each layer is a Mamba-2 or attention layer followed by an MLP. These are two layers of our hybrid pattern."""

import dataclasses
from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import EMBEDDING as WORDS
from megatron.conversion.family import HEAD, Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.mamba import MIXER, MambaHeads, StepLimits, mamba_layer
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import TensorMapping
from megatron.core.transformer.layer_patterns import hybrid_letters

_ENDS = {
    "embedding.word_embeddings.weight": WORDS,
    "decoder.final_layernorm.weight": "model.final_layernorm.weight",
    "output_layer.weight": HEAD,
}
_MIXER_NORM = decoder.weights({"input_layernorm": "input_layernorm"})
_ATTENTION = decoder.BIASED_ATTENTION | _MIXER_NORM
_MLP = decoder.gated(f"{OURS}.mlp", f"{HUB}.feed_forward") | decoder.weights({"pre_mlp_layernorm": "pre_ff_layernorm"})


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

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the pattern, with an MLP behind each letter."""
        count, attention = config["num_hidden_layers"], config["attn_layer_indices"] or []
        pattern = "".join("*-" if layer in attention else "M-" for layer in range(count))
        return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        mixers = _mixers(values)
        attention = [layer for layer, mixer in enumerate(mixers) if mixer == "*"]
        return {"num_hidden_layers": len(mixers), "attn_layer_indices": attention}


BAMBA_FAMILY = Family(
    "BambaForCausalLM",
    "bamba",
    _tensors,
    (
        *(rule for rule in decoder.SIZES if rule.reads != ("num_hidden_layers",)),
        *decoder.SWIGLU,
        decoder.EPSILON,
        LayersInPairs(),
        MambaHeads("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        StepLimits(),
        layer_rules.AttentionHeads(),
        layer_rules.ATTENTION_BIASES,
        layer_rules.MLP_BIASES,
        RotaryPositions(rotated_part=0.5),
        *rules.copied(mamba_n_groups="mamba_num_groups", mamba_d_state="mamba_state_dim"),
        rules.Copied("mamba_d_conv", "mamba_conv_kernel_dim"),
        *rules.fixed(mamba_conv_bias=True, mamba_proj_bias=False),
        rules.Unused(("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")),
        rules.Unused(("layers_block_type", "layer_types", "use_mamba_kernels")),
    ),
)
