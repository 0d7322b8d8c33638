"""The largest attention logits of a step, and QK-Clip's factors of query and key weights (Kimi K2, arXiv:2507.20534).

Attention layers keep the largest logit of each head over the micro-batches of a step, in
`DotProductAttention.max_logits`. All ranks that hold heads or tokens of a stage take the maximum, so the values are the
same in every layout.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import all_reduce
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.parameters import info_of
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.cross_attention import CrossAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

Attention = SelfAttention | CrossAttention | MLASelfAttention


class AttentionLogits:
    """The largest logits of the attention layers of a rank's model chunks."""

    def __init__(self, chunks: Sequence[nn.Module], groups: ProcessGroupCollection, device: torch.device) -> None:
        self.groups = groups
        found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Attention)]
        self.layers = [layer for layer in found if isinstance(layer.core_attention, DotProductAttention)]
        self._heads = max((layer.config.num_attention_heads for layer in self.layers), default=0)
        # Keeps its address for CUDA graphs.
        self.values = torch.full((len(self.layers), self._heads), -torch.inf, dtype=torch.float64, device=device)
        """[layers of this rank, heads of the model], float64; -inf for a head that computed nothing."""

    @torch.no_grad()
    def collect(self) -> Tensor:
        """Takes the maxima of the layers since the last call and resets them. Returns the largest logit of the whole
        model, a float64 scalar, equal on all ranks; NaN counts as infinite. Collective."""
        self.values.fill_(-torch.inf)
        for row, layer in zip(self.values, self.layers, strict=True):
            core = layer.core_attention
            measured = core.max_logits
            if measured is not None:
                own = slice(core.first_head, core.first_head + len(measured))
                row[own] = measured.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
                measured.fill_(-torch.inf)
        if self.layers and self.groups.size("tp_dp_cp") > 1:
            all_reduce(self.values, self.groups.tp_dp_cp, ReduceOp.MAX)
        largest = self.values.max() if self.layers else self.values.new_full((), -torch.inf)
        return all_reduce(largest, self.groups.pp, ReduceOp.MAX) if self.groups.size("pp") > 1 else largest

    def row_factors(self, threshold: float, alpha: float) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields the weights and biases of this rank's query and key projections, each with the factors of its rows,
        for the logits of the last `collect`.

        A head whose largest logit S is above the threshold has the factor f = threshold / S: its queries are scaled by
        f^alpha and its keys by f^(1 - alpha). Query heads that share a key head all take the smallest of their factors.
        In multi-head latent attention all heads share the rotary channels of the keys, which stay unchanged; so the
        rotary channels of the queries are scaled by f.
        """
        above = (self.values > threshold) & self.values.isfinite()
        factors = torch.where(above, threshold / self.values, 1.0)
        for layer, of_heads in zip(self.layers, factors, strict=True):
            for projection, table in _tables(layer, of_heads, alpha):
                # Other parameters have no rows: the weights of a norm before the product, the history of fp8 scales.
                own = dict(projection.named_parameters(recurse=False))
                if "weight" not in own:
                    raise UserError(
                        f"--qk-clip: {type(projection).__name__} projects queries or keys without a weight of "
                        "its own; use a ColumnParallelLinear in the layer spec"
                    )
                for name in ("weight", "bias", "key_value_weight", "key_value_bias"):  # see SharedKeyValueLinear
                    if name in own:
                        yield own[name], rows_of(own[name], table)


def _tables(layer: Attention, factors: Tensor, alpha: float) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yields the projections of a layer, each with the factors of all its rows, in the canonical shape of the rows."""
    query, key = factors**alpha, factors ** (1.0 - alpha)
    if isinstance(layer, MLASelfAttention):
        latent = layer.config
        sizes = latent.qk_head_dim, latent.qk_pos_emb_head_dim, latent.v_head_dim
        ones = torch.ones_like(factors)
        up = layer.linear_q_proj if latent.q_lora_rank is None else layer.linear_q_up_proj
        yield up, _stretched((query, factors), sizes[:2])
        yield layer.linear_kv_up_proj, _stretched((key, ones), (sizes[0], sizes[2]))
        return
    config = layer.config
    assert config.kv_channels is not None and config.num_query_groups is not None
    if isinstance(layer, CrossAttention):
        yield layer.linear_q, query[:, None].expand(-1, config.kv_channels)
        table = torch.stack([key, torch.ones_like(key)], -1)
        yield layer.linear_kv, table[..., None].expand(-1, -1, config.kv_channels)
        return
    groups = config.num_query_groups
    heads = config.num_attention_heads // groups
    query, key = (each.view(groups, heads).amin(1, keepdim=True) for each in (query, key))
    gates = [torch.ones_like(query).expand(-1, heads)] if config.attention_output_gate else []
    table = torch.cat([query.expand(-1, heads), *gates, key, torch.ones_like(key)], 1)  # [groups, heads of a group]
    yield layer.linear_qkv, table[..., None].expand(-1, -1, config.kv_channels)


def _stretched(columns: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Returns [heads, sum of sizes], in which each column [heads] is repeated `size` times."""
    return torch.cat([column[:, None].expand(-1, size) for column, size in zip(columns, sizes, strict=True)], 1)


def rows_of(parameter: nn.Parameter, table: Tensor) -> Tensor:
    """Returns the factors of the rows that a rank holds of a projection's weight or bias."""
    info = info_of(parameter)
    rows = table.dim()
    if info.global_shape[:rows] != tuple(table.shape):
        raise UserError(
            f"--qk-clip: {info.name} has the shape {list(info.global_shape)}, and its heads are not known; use a "
            "ColumnParallelLinear in the layer spec"
        )
    for dim, (start, length) in enumerate(zip(info.box.start[:rows], info.box.shape[:rows], strict=True)):
        table = table.narrow(dim, start, length)
    return table.reshape(-1)
