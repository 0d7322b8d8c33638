"""DeepSeek sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): latent attention to the keys that an indexer selects."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import gather_rows
from megatron.core.context_parallel import cut_rows
from megatron.core.context_parallel.all_gather import gather_whole_rows
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.attached_loss import attach_loss
from megatron.core.ops.attention.indexer import indexer_loss, unselected_keys
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, hidden_keys
from megatron.core.ops.rope import Rotation
from megatron.core.parameters import Constant
from megatron.core.tensor_parallel.replicated import ReplicatedLinear
from megatron.core.tensor_parallel.storage import new_parameter
from megatron.core.tokens import row_index
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs, as_heads
from megatron.core.transformer.layer_metrics import LayerMetrics
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules, score_scale
from megatron.core.transformer.transformer_config import MLATransformerConfig

_CAUSAL = AttentionVariant(scale=1.0, causal=True)


class IndexerHeads(NamedTuple):
    """The indexer's queries, keys and weights of some tokens."""

    query: Tensor
    """[s, b, dsa_indexer_n_heads, dsa_indexer_head_dim]"""
    key: Tensor
    """[s, b, dsa_indexer_head_dim], one for all heads"""
    weight: Tensor
    """Factor of each head's products, [s, b, dsa_indexer_n_heads]"""


class DSAIndexer(MegatronModule):
    """The lightning indexer: a small attention without values that scores the keys of each query.

        q = rotate(W_q c),  k = rotate(LayerNorm(W_k x)),  w = W_w x / sqrt(heads * width)
        I(t, s) = sum over heads j of w(t, j) relu(q(t, j) . k(s))

    c is the normed latent of the queries, or the hidden state x if queries have no latent. The first
    `qk_pos_emb_head_dim` channels have rotary positions, in halves unless `dsa_indexer_rope_interleaved`. Its inputs
    get no gradient, so only its own loss trains it; without `dsa_indexer_loss_coeff` it is not trained. All tensor
    parallel ranks have the whole indexer and compute the same result.
    """

    def __init__(self, config: MLATransformerConfig, tp_group: Any, backend: Backend) -> None:
        super().__init__(config)
        heads, width, h = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.hidden_size
        assert heads and width and config.init_method is not None
        self.heads, self.factor, self.backend = heads, (heads * width) ** -0.5, backend
        self.tp_group = tp_group if config.sequence_parallel else None

        def linear(input_size: int, output_size: int) -> ReplicatedLinear:
            facts: dict[str, Any] = {"init_method": config.init_method, "bias": False, "input_is_whole": True}
            return ReplicatedLinear(input_size, output_size, config=config, tp_group=tp_group, backend=backend, **facts)

        self.linear_wq_b = linear(config.q_lora_rank or h, heads * width)
        self.linear_wk = linear(h, width)
        self.k_norm = IndexerKeyNorm(config, width, backend)
        self.linear_weights_proj = linear(h, heads)
        if not config.dsa_indexer_loss_coeff:
            self.requires_grad_(False)

    def forward(self, hidden_states: Tensor, latent: Tensor, inputs: LayerInputs, rotation: Rotation | None) -> Any:
        """Returns `IndexerHeads` of all tokens, for hidden states [t, h] and latents [t, r] of queries; under sequence
        parallelism both are this rank's part."""
        hidden_states, latent = (gather_rows(rows.detach(), self.tp_group) for rows in (hidden_states, latent))
        query = as_heads(self.linear_wq_b(latent)[0], inputs.tokens, self.heads)
        key = as_heads(self.k_norm(self.linear_wk(hidden_states)[0]), inputs.tokens, 1)
        if rotation is not None:
            rotation = dataclasses.replace(rotation, interleaved=self.config.dsa_indexer_rope_interleaved)
            query, key = (self.backend.attention.apply_rope(part, rotation) for part in (query, key))
        weight = as_heads(self.linear_weights_proj(hidden_states)[0], inputs.tokens, self.heads).squeeze(-1)
        return IndexerHeads(query, key.squeeze(2), weight * self.factor)


class IndexerKeyNorm(nn.Module):
    """The LayerNorm of the indexer's keys, which does not depend on the kind of the model's norms."""

    def __init__(self, config: MLATransformerConfig, width: int, backend: Backend) -> None:
        super().__init__()
        own = config.dsa_indexer_k_norm_epsilon
        self.eps, self.backend = config.layernorm_epsilon if own is None else own, backend
        self.weight = new_parameter(config, (width,), Constant(1.0))
        self.bias = new_parameter(config, (width,), Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed keys [t, width]."""
        return self.backend.norms.layer_norm(x, self.weight, self.bias, self.eps, False)


class SparseLatentAttention(MLASelfAttention):
    """Multi-head latent attention in which each query attends to the `dsa_indexer_topk` keys that the indexer scores
    highest, among those it may see.

    In training the indexer's loss is added to the model's: `dsa_indexer_loss_coeff` times the mean over tokens of
    KL(attention's mean distribution over its heads || softmax(I)), over all keys that a query may see, or with
    `dsa_indexer_use_sparse_loss` over the selected ones. The distribution over all keys is that of attention without
    selection.

    Under context parallelism each rank scores the keys of whole rows for its own queries, so the indexer's keys are
    gathered, and for the loss the keys of attention too.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        groups = groups_or_default(pg_collection)
        backend = backend or choose_backend(config)
        super().__init__(
            config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection=groups, backend=backend
        )
        self.indexer = DSAIndexer(config, groups.tp, backend)
        if isinstance(self.core_attention, DotProductAttention):
            self.core_attention.expect_selected_keys()
        self.metrics = LayerMetrics(layer_number)
        self.score_scale = score_scale(config)
        self.cp_group, self.cp_size = groups.cp, groups.size("cp")

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], bias of the output projection that the caller adds) for hidden states [t, h]. Under
        sequence parallelism both hold this rank's tokens."""
        latents = self.compress(hidden_states, inputs)
        index: IndexerHeads = self.indexer(hidden_states, latents.query, inputs, self._rotation(inputs))
        places = None
        if inputs.inference_context is None:
            query, key, value = self.expand(*latents, inputs)
            index = index._replace(key=self._whole_rows(index.key))
        else:
            query = self.query_heads(latents.query, inputs)
            seen = inputs.inference_context.extend(
                self.layer_number, *self.key_value_heads(latents.key_value, latents.shared_key)
            )
            key, value, places = seen.key, seen.value, seen.query_positions
            index_key = index.key[:, :, None]
            seen = inputs.inference_context.extend(self.layer_number, index_key, index_key[..., :0], "indexer")
            index = index._replace(key=seen.key.squeeze(2))
        hidden = self._hidden_keys(inputs, query.shape[0], index.key.shape[0], places, query.device)
        mask = self._unselected(index, hidden, inputs)
        attended = self.core_attention(query, key, value, mask, inputs=inputs, query_positions=places)
        if self.training and torch.is_grad_enabled() and self.config.dsa_indexer_loss_coeff:
            if self.config.dsa_indexer_use_sparse_loss and mask is not inputs.attention_mask:
                hidden = partial(_rows_of, mask)
            attended = self._with_loss(attended, index, query, key, hidden, inputs)
        return self.linear_proj(attended.flatten(0, 1))

    def _unselected(self, index: IndexerHeads, hidden: Callable[[int, int], Tensor], inputs: LayerInputs) -> Any:
        """Returns the mask of attention: the keys that the indexer leaves out, or the mask given if it selects all."""
        topk, relu = self.config.dsa_indexer_topk, self.config.dsa_indexer_scoring_relu
        assert topk
        if index.key.shape[0] <= topk:
            return inputs.attention_mask
        return unselected_keys(*index, hidden, topk, relu, self.backend.attention.index_scores)

    def _with_loss(
        self,
        attended: Tensor,
        index: IndexerHeads,
        query: Tensor,
        key: Tensor,
        hidden: Callable[[int, int], Tensor],
        inputs: LayerInputs,
    ) -> Tensor:
        attention = query.detach(), self._whole_rows(key.detach()), self.score_scale
        relu, coefficient = self.config.dsa_indexer_scoring_relu, self.config.dsa_indexer_loss_coeff
        assert coefficient
        summed, count = indexer_loss(index, attention, hidden, relu, self.tp_group), inputs.tokens.count
        self.metrics.add("indexer_loss", summed / count, 1.0)
        # The losses of context parallel ranks are added. With a loss per token gradients are divided by tokens later.
        share = summed if self.config.calculate_per_token_loss else summed / (count * self.cp_size)
        return attach_loss(attended, share * coefficient, inputs.auxiliary_scale)

    def _whole_rows(self, rows: Tensor) -> Tensor:
        """Returns whole rows of keys [sk, b, ...] for this rank's part of them [s, b, ...]."""
        return rows if self.cp_size == 1 else gather_whole_rows(rows, self.cp_group, self.cp_size)

    def _hidden_keys(
        self, inputs: LayerInputs, sq: int, sk: int, places: Tensor | None, device: torch.device
    ) -> Callable[[int, int], Tensor]:
        """Returns a function that gives the keys that a block of queries may not see, before any selection."""
        mask, part = inputs.attention_mask, inputs.tokens.part
        if mask is not None and mask.shape[1] != 1:
            raise UserError("dsa selects keys for all heads, so an attention_mask has the shape [b, 1, s, s]")
        if part is not None:
            places = row_index(inputs.tokens, device)[None]
            mask = cut_rows(mask, part, 2) if mask is not None and mask.shape[2] == inputs.tokens.row_length else mask
        call = AttentionCall(query_positions=places, mask=mask, cu_seqlens=inputs.tokens.cu_seqlens)

        def of_block(first: int, rows: int) -> Tensor:
            hidden = hidden_keys(_CAUSAL, call, first, rows, sq, sk, device)
            assert hidden is not None
            return hidden.squeeze(1) if hidden.dim() == 4 else hidden[None]

        return of_block


def _rows_of(mask: Tensor, first: int, rows: int) -> Tensor:
    """Returns the rows of a block of queries of a mask [b, 1, s, sk]: [b, rows, sk]."""
    return mask[:, 0, first : first + rows]
