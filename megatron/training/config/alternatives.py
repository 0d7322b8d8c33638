"""Flags that say the same thing in different ways: a given one replaces the others of a recipe or a checkpoint."""

from megatron.training.config.model import ACTIVATIONS

SAME_THING: dict[str, tuple[str, ...]] = {
    "seq_length": ("encoder_seq_length",),
    "encoder_seq_length": ("seq_length",),
    "num_layers": ("encoder_num_layers", "decoder_num_layers"),
    "encoder_num_layers": ("num_layers",),
    "hybrid_layer_pattern": ("hybrid_attention_ratio", "hybrid_mlp_ratio", "mtp_hybrid_override_pattern"),
    "hybrid_attention_ratio": ("hybrid_layer_pattern",),
    "hybrid_mlp_ratio": ("hybrid_layer_pattern",),
    "heterogeneous_layers_config_path": ("heterogeneous_layers_config_encoded_json",),
    "lr_warmup_iters": ("lr_warmup_fraction",),
    "lr_warmup_samples": ("lr_warmup_fraction",),
    **{name: tuple(other for other in ACTIVATIONS if other != name) for name in ACTIVATIONS},
}
"""Fields that are not taken if this one is given."""
