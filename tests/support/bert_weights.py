"""Weights of the BERT models of `transformers` under our names."""

from collections.abc import Mapping

import torch
from torch import Tensor

_NORMS_BEFORE = {"input_layernorm": "attention.ln", "pre_mlp_layernorm": "ln"}
_NORMS_BEHIND = {"post_attention_layernorm": "attention.output.LayerNorm", "post_mlp_layernorm": "output.LayerNorm"}


def bert_weights(theirs: Mapping[str, Tensor], layers: int, heads: int, norms_before: bool) -> dict[str, Tensor]:
    """State dict of a BertModel with the weights of a BertForPreTraining or, with `norms_before`, of a
    MegatronBertForPreTraining."""
    names = {
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "pooler.dense": "bert.pooler.dense",
        "binary_head": "cls.seq_relationship",
        **({"encoder.final_layernorm": "bert.encoder.ln"} if norms_before else {}),
        **({} if norms_before else {"embedding.norm": "bert.embeddings.LayerNorm"}),
    }
    for number in range(layers):
        parts = {
            "self_attention.linear_proj": "attention.output.dense",
            "mlp.linear_fc1": "intermediate.dense",
            "mlp.linear_fc2": "output.dense",
            **(_NORMS_BEFORE if norms_before else _NORMS_BEHIND),
        }
        names |= {
            f"encoder.layers.{number}.{ours}": f"bert.encoder.layer.{number}.{part}" for ours, part in parts.items()
        }
    found = {f"{ours}.{kind}": theirs[f"{part}.{kind}"] for ours, part in names.items() for kind in ("weight", "bias")}
    tables = {"word": "word", "position": "position", "tokentype": "token_type"}
    found |= {
        f"embedding.{ours}_embeddings.weight": theirs[f"bert.embeddings.{t}_embeddings.weight"]
        for ours, t in tables.items()
    }
    for number in range(layers):
        for kind in ("weight", "bias"):
            parts = [
                theirs[f"bert.encoder.layer.{number}.attention.self.{one}.{kind}"] for one in ("query", "key", "value")
            ]
            by_head = torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], 1)  # [a, 3, d, ...]
            found[f"encoder.layers.{number}.self_attention.linear_qkv.{kind}"] = by_head.flatten(0, 2)
    return found | {"output_layer.bias": theirs["cls.predictions.bias"]}
