"""Scaled dot-product attention: the part between the QKV projection and the output projection."""

import dataclasses
import math

import torch
from torch import Tensor

from megatron.core.attention_plan import plan_attention, plan_attention_blocks
from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import group_rank, group_size
from megatron.core.context_parallel.attention import ContextAttention
from megatron.core.context_parallel.comm_types import comm_type_of
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.attention.alibi import alibi_slopes
from megatron.core.ops.attention.chunks import chunks_of_documents, chunks_of_row
from megatron.core.ops.attention.kernels import Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.storage import new_parameter, split_box
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs, is_plain_causal
from megatron.core.transformer.layer_patterns import is_chunked, is_windowed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recompute_cache import run_once_under_recompute

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_PADDED = (AttnMaskType.padding, AttnMaskType.padding_causal)


class DotProductAttention(MegatronModule):
    """Computes softmax(scale Q K^T) V (Vaswani et al. 2017) with the first kernel that supports the layer.

    Scores are scaled by `softmax_scale`, default 1/sqrt(kv_channels). A query or key head has `k_channels` channels, a
    value head `v_channels`; both default to `kv_channels`. `apply_query_key_layer_scaling` is accepted and has no
    effect: the layer number would be a divisor before the softmax and a factor inside it, and the softmax is computed
    in float32 at least.

    If `softmax_type` is not vanilla, the denominator of the softmax has one more logit per head: 0, or a learnt one.
    `attn_logit_softcapping` bounds the scores, `alibi` lowers them with distance, `window_size` and
    `attention_chunk_size` hide keys, `relative_bias` adds a bias to the scores. With `attention_type` cross the keys
    are another sequence, and these four settings do not apply, because queries and keys have no common order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        k_channels: int | None = None,
        v_channels: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.backend = backend or choose_backend(config)
        groups = groups_or_default(pg_collection)
        heads = config.num_attention_heads
        local_heads = heads // group_size(groups.tp)
        self.first_head = local_heads * group_rank(groups.tp)
        self.crosses = attention_type == "cross"
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.widths = k_channels or config.kv_channels or 1, v_channels or config.kv_channels or 1
        """Number of channels of a query or key head, and of a value head."""
        self.variant = AttentionVariant(
            scale=scale if scale is not None else 1.0 / math.sqrt(self.widths[0]),
            causal=attn_mask_type in _CAUSAL,
            window=config.window_size if is_windowed(config, self.layer_number) and not self.crosses else None,
            dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
            sink=config.softmax_type != "vanilla",
            widths=self.widths,
            cap=config.attn_logit_softcapping,
            slopes=tuple(slope * config.alibi_factor for slope in alibi_slopes(heads))
            if config.alibi and not self.crosses
            else None,
            chunk=config.attention_chunk_size if is_chunked(config, self.layer_number) and not self.crosses else None,
            adds_bias=config.relative_bias and not self.crosses,
            padded=attn_mask_type in _PADDED,
        )
        self.plan = plan_attention(self.backend, self.variant, config)
        self.context: ContextAttention | None = None
        if groups.size("cp") > 1 or (config.hybrid_context_parallel and groups.size("dp_cp") > 1):
            if self.crosses or self.variant.adds_bias:
                what = "cross attention" if self.crosses else "a relative position bias"
                raise UserError(f"context_parallel_size {groups.size('cp')} does not go with {what}; use 1")
            comm_type = comm_type_of(config, self.layer_number, cp_comm_type)
            blocks = plan_attention_blocks(self.backend, self.variant, config)
            self.context = ContextAttention(
                comm_type, groups, self.variant, local_heads, self.plan, blocks, self.backend.attention.merge_block
            )
        self.measures_logits = config.log_max_attention_logit or config.qk_clip
        self.max_logits: Tensor | None = None
        """[heads of this rank]: the largest logits since `AttentionLogits.collect`, in float32 at least."""
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            assert config.init_method is not None
            box = split_box((heads,), 0, groups.tp)
            self.softmax_offset = new_parameter(
                config, box.shape, config.init_method, global_shape=(heads,), box=box, sharded_axes=frozenset({"tp"})
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        inputs: LayerInputs | None = None,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention output [s, b, a * d] for a query [s, b, a, d] and key and value [sk, b, g, d].

        `attention_mask` (bool, True hides a key) applies in addition to the layer's own mask. `attention_bias`
        (broadcasts to [b, a, s, sk]) is added to the scores, in a layer with `relative_bias`. Without `inputs` there is
        no dropout. `query_positions` [b, s] is the position of each query as an index of a key; without it the queries
        have the last keys' positions. Under context parallelism s is this rank's part of the rows, and masks have the
        form that `ContextAttention` accepts.
        """
        if attn_mask_type not in (None, self.attn_mask_type):
            raise UserError(
                f"attn_mask_type {attn_mask_type} differs from {self.attn_mask_type}, which the layer was built with"
            )
        if (attention_bias is not None) != self.variant.adds_bias:
            raise UserError(
                f"attention_bias is {'missing' if attention_bias is None else 'given'}, while the layer was built with "
                f"config.relative_bias {self.variant.adds_bias}"
            )
        if self.variant.causal and is_plain_causal(attention_mask):
            attention_mask = None
        tokens = inputs.tokens if inputs is not None else None
        cu_seqlens = tokens.cu_seqlens if tokens is not None else None
        max_seqlen = tokens.max_seqlen if tokens is not None else None
        if packed_seq_params is not None:
            cu_seqlens, max_seqlen = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        context = self._context_of(tokens)
        if self.variant.chunk is not None:
            keys = key.shape[0] * (1 if context is None else context.part.size)
            cu_seqlens, max_seqlen = self._chunks(cu_seqlens, keys, key.device)
        dropout = (
            inputs.dropout_position(self.layer_number, "encoder_attention" if self.crosses else "attention")
            if inputs is not None and self.training
            else None
        )
        call = AttentionCall(
            query_positions=query_positions,
            mask=attention_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            sink=self._sink(query),
            dropout=dropout,
            first_head=self.first_head,
            bias=attention_bias,
            key_start=self._key_start(inputs) if dropout is not None else None,
        )
        if self.measures_logits and self.training and torch.is_grad_enabled():
            run_once_under_recompute((self, "max_logits"), lambda: self._measure_logits(query, key, call, context))
        situation = Situation(query.device.type, self.config.params_dtype, dropout is not None, cu_seqlens is not None)
        if context is not None:
            return context(query, key, value, call, situation).flatten(2)
        # On a CPU: `attention` of megatron/core/ops/attention/unfused.py, the definition.
        compute = self.plan.kernel_of(situation, call, query.shape[0]).compute
        return compute(query, key, value, self.variant, call).flatten(2)  # [s, b, a * d]

    def expect_selected_keys(self) -> None:
        """From now on calls have masks that select keys for each query, the same for all heads."""
        self.variant = dataclasses.replace(self.variant, selects=True)
        self.plan = plan_attention(self.backend, self.variant, self.config)

    @torch.no_grad()
    def _measure_logits(
        self, query: Tensor, key: Tensor, call: AttentionCall, context: ContextAttention | None
    ) -> None:
        if context is not None:
            key, call = context.whole_keys(query, key, call)
        found = self.backend.attention.max_attention_logits(query, key, self.variant, call)
        if self.max_logits is None:
            self.max_logits = torch.full_like(found, -torch.inf)
        torch.maximum(self.max_logits, found, out=self.max_logits)

    def _key_start(self, inputs: LayerInputs | None) -> Tensor | None:
        """Returns the global index of the first key of each row, int64 [b], if the keys are the encoder's tokens."""
        encoder = inputs.encoder if self.crosses and inputs is not None else None
        if encoder is None or encoder.dropout is None:
            return None
        return encoder.dropout.index.view(encoder.tokens.seq_length, encoder.tokens.batch_size)[0]

    def _chunks(self, cu_seqlens: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, int]:
        """Returns the boundaries of the chunks in a row of keys, and the length of the longest chunk."""
        chunk = self.variant.chunk
        assert chunk is not None
        if cu_seqlens is None:
            return chunks_of_row(length, chunk, device), min(chunk, length)
        return chunks_of_documents(cu_seqlens, length, chunk), min(chunk, length)

    def _context_of(self, tokens: Tokens | None) -> ContextAttention | None:
        """Returns the attention over the ranks that share the rows of these tokens; None if this rank has whole
        rows."""
        if self.context is None or tokens is None:
            return self.context
        part, own = tokens.part, self.context.part
        if part == own and part.group is None:
            return self.context
        if part is None and (self.config.hybrid_context_parallel or own.size == 1):
            return None
        if part is None or part.group is None:
            raise UserError(f"tokens.part is {part}, but this rank holds {own} of every row")
        return self.context.over(part)

    def _sink(self, query: Tensor) -> Tensor | None:
        if not self.variant.sink:
            return None
        return self.softmax_offset if self.softmax_offset is not None else query.new_zeros(query.shape[2])
