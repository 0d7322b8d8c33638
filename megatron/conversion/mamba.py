"""Mamba2, and the tables of Mamba-2 layers that hybrid models share with it."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.decoder import OURS, one_to_one
from megatron.conversion.family import HEAD, Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import ALL, HubTensorPattern
from megatron.core.exceptions import UserError
from megatron.core.transformer.config.hybrid import mamba_heads

EMBEDDING = "backbone.embeddings.weight"
MIXER = "backbone.layers.{layer}.mixer"

AROUND: decoder.Mapping = one_to_one(
    {
        "embedding.word_embeddings.weight": EMBEDDING,
        "decoder.final_layernorm.weight": "backbone.norm_f.weight",
        "output_layer.weight": HEAD,
        f"{OURS}.input_layernorm.weight": "backbone.layers.{layer}.norm.weight",
        f"{OURS}.pre_mlp_layernorm.weight": "backbone.layers.{layer}.norm.weight",  # a layer has one of the two
    }
)


def mamba_layer(values: rules.Values) -> decoder.Mapping:
    """Returns the table of a Mamba-2 layer. Theirs has z of all groups, then x, then B, then C, then dt; ours has all
    of these of a group before those of the next."""
    ours, state = f"{OURS}.self_attention", values["mamba_state_dim"]
    channels = mamba_heads(run_of(values)) // values["mamba_num_groups"] * values["mamba_head_dim"]
    mixed = _parts(channels, state, state)
    whole = _parts(channels, channels, state, state, None)
    kept = ("A_log", "D", "dt_bias", "out_proj.weight")
    return one_to_one(
        {f"{ours}.{name}": f"{MIXER}.{name}" for name in kept} | {f"{ours}.norm_weight": f"{MIXER}.norm.weight"}
    ) | {
        f"{ours}.in_proj.weight": (HubTensorPattern(f"{MIXER}.in_proj.weight", whole[0], fused=whole[1:]),),
        f"{ours}.conv1d.weight": (
            HubTensorPattern(f"{MIXER}.conv1d.weight", mixed[0], fused=mixed[1:], axes=((0, 1), (), (2,))),
        ),
        f"{ours}.conv1d.bias": (HubTensorPattern(f"{MIXER}.conv1d.bias", mixed[0], fused=mixed[1:]),),
    }


def _parts(*sizes: int | None) -> tuple[tuple[slice, ...], ...]:
    """Returns the slices of the rows of a group, one behind the other; None: up to the end."""
    parts, begin = [], 0
    for size in sizes:
        end = None if size is None else begin + size
        parts.append((ALL, slice(begin, end)))
        begin = end or 0
    return tuple(parts)


@dataclass(frozen=True)
class MambaHeads(rules.Rule):
    """Heads of a Mamba-2 layer. With `expand`, their channels are a multiple of the hidden size."""

    number: str
    width: str
    expand: str = ""
    """Key with the number that, times the hidden size, is the width of all heads; empty: the family has none."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        return tuple(filter(None, (self.number, self.width, self.expand)))

    def fields(self, config: Json) -> dict[str, object]:
        """Returns number and width. Raises UserError if the keys contradict each other."""
        number, width = config[self.number], config[self.width]
        channels = config[self.expand] * config["hidden_size"] if self.expand else number * width
        width = channels // number if width == "auto" else width
        if not isinstance(width, int) or number * width != channels:
            raise UserError(
                f"{self.width} is {width!r}; with {self.number} {number} it must be {self.expand} * hidden_size / "
                f"{self.number} (--mamba-num-heads, --mamba-head-dim), {channels} / {number}"
            )
        return {"mamba_num_heads": number, "mamba_head_dim": width}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        number, width = mamba_heads(run_of(values)), values["mamba_head_dim"]
        return dict(zip(self.reads, (number, width, number * width // values["hidden_size"]), strict=False))


@dataclass(frozen=True)
class StepLimits(rules.Rule):
    """The step sizes of Mamba2's layers have a lower limit; an upper one is unsupported."""

    reads = ("time_step_limit",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the lower limit."""
        given = config["time_step_limit"]
        given = [0.0, _INFINITE] if given is None else given
        if len(given) != 2 or not isinstance(given[0], int | float) or given[1] not in (_INFINITE, *_NO_LIMIT):
            raise UserError(f"time_step_limit is {given}; a smallest step and no largest one (Infinity) are supported")
        return {"mamba_min_time_step": float(given[0])}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both limits if there is a lower one. transformers writes infinity in this form."""
        least = values["mamba_min_time_step"]
        return {"time_step_limit": [least, _INFINITE]} if least else {}


@dataclass(frozen=True)
class MambaLayers(rules.Rule):
    """All layers are Mamba-2 layers."""

    reads = ("num_hidden_layers",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the pattern and the number of layers."""
        count = config["num_hidden_layers"]
        return {"num_layers": count, "hybrid_layer_pattern": "M" * count}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the number of layers."""
        return {"num_hidden_layers": values["num_layers"]}


_INFINITE = {"__float__": "Infinity"}
_NO_LIMIT = (float("inf"), "Infinity", None)

MAMBA_RULES: tuple[rules.Rule, ...] = (
    *rules.copied("hidden_size", n_groups="mamba_num_groups", conv_kernel="mamba_conv_kernel_dim"),
    *rules.copied(layer_norm_epsilon="layernorm_epsilon", initializer_range="init_method_std"),
    *rules.fixed(use_bias=False, use_conv_bias=True),
    rules.Implied({"normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "none"}),
    # Sizes of a kernel, types of intermediate results, and how weights are initialized:
    rules.Unused(("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_max", "time_step_floor")),
    rules.Unused(("time_step_rank", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype")),
)

MAMBA2_FAMILY = Family(
    "Mamba2ForCausalLM",
    "mamba2",
    lambda values: AROUND | mamba_layer(values),
    (
        *MAMBA_RULES,
        MambaLayers(),
        MambaHeads("num_heads", "head_dim", "expand"),
        StepLimits(),
        rules.TiedEmbeddings(),
        rules.Copied("state_size", "mamba_state_dim"),
        rules.Fixed("hidden_act", "silu"),
        rules.Implied({"hidden_dropout": 0.0}),
        rules.Unused(("time_step_min", "norm_before_gate", "rms_norm")),
    ),
    copies={HEAD: EMBEDDING},
)
