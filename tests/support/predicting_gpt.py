"""Small GPTs with multi-token prediction, and batches for them, for tests of all layouts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, ROW, ROWS = 37, 16, 2
EDGES = [0, 5, 6, 19, ROW * ROWS]
"""Ends of documents in the packed batch (rows end to end). One document spans the end of a row."""
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
TIED = {"share_embeddings_and_output_weights": True}
ROPE = {"position_embedding_type": "rope"}


def predicting_config(**settings: Any) -> TransformerConfig:
    """Returns a config of two layers in float64, by default without dropout."""
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "mtp_num_layers": 2}
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fp64": True, "embedding_init_method_std": 0.5}
    return TransformerConfig(**{**sizes, **plain, **settings})


def predicting_model(
    config: TransformerConfig, groups: ProcessGroupCollection | None = None, vp_stage: int | None = None, **model: Any
) -> GPTModel:
    """Builds the model, or one rank's chunk of it."""
    rank = 0 if groups is None else groups.rank("pp")
    place = {"use_transformer_engine": False, "vp_stage": vp_stage, "pp_rank": rank}
    spec = get_gpt_decoder_block_spec(config, **place)
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        ROW * ROWS,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, **place),
        pg_collection=groups,
        vp_stage=vp_stage,
        **model,
    )


def whole_batch(packed: bool = False, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, labels and a mask with holes, [b, s], of batch `number`. Packed: rows end to end, [1, b s]."""
    generator = torch.Generator().manual_seed(1 + number)
    ids = torch.randint(VOCABULARY, (ROWS, ROW + 1), generator=generator)
    mask = torch.rand(ROWS, ROW, generator=generator)
    mask[mask < 0.3 + 0.2 * number] = 0.0
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return (ids.view(1, -1), labels.view(1, -1), mask.view(1, -1)) if packed else (ids, labels, mask)


def tokens_of(packed: bool = False, part: Any = None) -> Tokens:
    """Returns the `Tokens` of the batch, or of a context parallel rank's part."""
    length, rows = (ROW * ROWS, 1) if packed else (ROW, ROWS)
    return Tokens(
        length // (1 if part is None else part.size),
        rows,
        part,
        cu_seqlens=torch.tensor(EDGES, dtype=torch.int32) if packed else None,
        max_seqlen=13 if packed else None,
        sample_length=ROW,
        random=RngPosition(7, 3, 5),
    )
