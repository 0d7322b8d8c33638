"""Transformer layers: attention, MLP, experts, and the specs that say which classes a layer consists of.

The names below are imported at their first use, because the whole library reads the fields of `TransformerConfig`.
"""

from megatron.homes import lazy_names

_HOMES = {
    "MLATransformerConfig": "megatron.core.transformer.transformer_config",
    "MegatronModule": "megatron.core.transformer.module",
    "ModuleSpec": "megatron.core.transformer.spec_utils",
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "TransformerLayer": "megatron.core.transformer.transformer_layer",
    "TransformerLayerSubmodules": "megatron.core.transformer.transformer_layer",
    "build_module": "megatron.core.transformer.spec_utils",
}

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
