"""Memory and time of a layout by closed formulas, in microseconds: they order and prune thousands of layouts.

The best ones are then computed exactly (`ranking`), so an error here only costs a good candidate its place among them.
Bytes per token and layer follow Korthikanti et al. 2022 (arXiv:2205.05198) with flash attention and sequence
parallelism; time is products, attention, communication that nothing hides, and the pipeline's bubble.
"""

from dataclasses import dataclass

from megatron.diagnosis.planning.layouts import Layout, Space
from megatron.diagnosis.planning.parameter_count import GATED, ParameterCount, parameter_count

_WEIGHTS, _GRADIENTS, _STATE = 2, 4, 12
"""Bytes of a parameter: bfloat16, float32, and float32 main weight and two moments of Adam."""
_LOGIT_BYTES = 8
_EXPOSED = 0.5
"""Part of the communication of tensor and expert parallelism that no computation hides."""


@dataclass(frozen=True)
class Rates:
    """What a GPU computes and sends in a second."""

    flops: float
    """Floating point operations of large products."""
    nvlink: float
    """Bytes to GPUs of its NVLink domain."""
    network: float
    """Bytes to other nodes."""


class RoughCost:
    """Costs of the layouts of one model."""

    def __init__(self, space: Space, vocab_size: int, rates: Rates) -> None:
        self._space, self._rates, self._vocab = space, rates, vocab_size
        flags = space.flags
        self._count = _count_of(space, vocab_size)
        self._h, self._layers = flags["hidden_size"], flags["num_layers"]
        heads = flags.get("num_attention_heads") or 1
        width = flags.get("kv_channels") or self._h // heads
        groups = flags.get("num_query_groups", 1) if flags.get("group_query_attention") else heads
        self._queries, self._keys = heads * width, groups * width
        self._gated = any(flags.get(name) for name in GATED)
        self._ffn = flags.get("ffn_hidden_size") or 4 * self._h
        self._expert_ffn = (flags.get("moe_ffn_hidden_size") or self._ffn) * flags.get("moe_router_topk", 2)
        self._expert_ffn += flags.get("moe_shared_expert_intermediate_size") or 0
        self._sparse = self._count.expert_layers / self._layers

    def memory(self, layout: Layout) -> float:
        """Returns the bytes of the rank that needs most: of the first stage or the last."""
        count, layers = self._count, self._layers / layout.pipeline
        dense = layers * (count.attention + count.norms + (1 - self._sparse) * count.dense_mlp)
        dense += layers * self._sparse * count.around_experts
        experts = layers * self._sparse * count.experts / layout.expert
        shards = layout.data * layout.context
        of_experts = max(1, layout.tensor * shards // layout.expert)
        ends = count.embedding, count.final
        edges = [sum(ends)] if layout.pipeline == 1 else list(ends)
        tokens = layout.micro_batch * self._space.seq_length / layout.context
        most = 0.0
        for stage, edge in zip((0, layout.pipeline - 1), edges, strict=False):
            held = (dense + edge) / layout.tensor * _bytes(layout.zero, shards)
            held += experts * _bytes(layout.zero, of_experts)
            held += self._activations(layout, tokens, layers, stage)
            if stage == layout.pipeline - 1:
                held += tokens * self._vocab / layout.tensor * _LOGIT_BYTES
            most = max(most, held)
        return most

    def _activations(self, layout: Layout, tokens: float, layers: float, stage: int) -> float:
        kept, whole = self._layer_bytes(layout.recompute), self._layer_bytes("none")
        live = 1.0
        if layout.pipeline > 1:
            microbatches = layout.num_microbatches(self._space.global_batch_size)
            warm_up = layout.pipeline - stage
            if layout.virtual > 1:
                warm_up = layout.pipeline * (layout.virtual - 1) + 2 * (layout.pipeline - stage) - 1
            live = min(warm_up / layout.virtual, microbatches)
        peak = whole - kept  # of the layer whose backward recomputes
        return tokens / layout.tensor * (layers * live * kept + peak)

    def _layer_bytes(self, recompute: str) -> float:
        """Returns the bytes that one layer keeps of a token."""
        h = self._h
        if recompute == "full":
            return 2.0 * h
        attention = 2 * (2 * h + 2 * self._queries + 2 * self._keys)
        products = 3 if self._gated else 2
        mlp = 0 if recompute == "mlp" else 2 * products * self._ffn
        experts = 2 * products * self._expert_ffn + 4 * h * self._space.flags.get("moe_router_topk", 2)
        return attention + 4 * h + (1 - self._sparse) * mlp + self._sparse * experts

    def seconds(self, layout: Layout) -> float:
        """Returns the time of a step."""
        space, rates, layers = self._space, self._rates, self._layers / layout.pipeline
        microbatches = layout.num_microbatches(space.global_batch_size)
        tokens = layout.micro_batch * space.seq_length / layout.context
        products = 2 * (self._count.active - self._count.embedding) / layout.pipeline
        scores = 2 * layers * space.seq_length * self._queries
        mlp = 2 * layers * (1 - self._sparse) * self._count.dense_mlp
        repeated = {"none": 0.0, "mlp": mlp, "full": products + scores}[layout.recompute]
        small = tokens * min(self._ffn, self._h) / layout.tensor
        efficiency = small / (small + 3e5)
        compute = tokens * (3 * (products + scores) + repeated) / layout.tensor / rates.flops / efficiency
        passes = 3 if layout.recompute == "full" else 2
        exchanged = passes * 4 * 2 * tokens * self._h * layers * (layout.tensor - 1) / layout.tensor
        exposed = exchanged / rates.nvlink * _EXPOSED
        if layout.context > 1:
            ring = 3 * 2 * 2 * tokens * self._keys * layers / layout.tensor * (layout.context - 1)
            exposed += max(0.0, ring / self._rate(layout.tensor * layout.context) - 0.5 * compute)
        if layout.expert > 1:
            copies = tokens / layout.tensor * space.flags.get("moe_router_topk", 2) * 2 * self._h
            exposed += 4 * copies * layers * self._sparse / self._rate(layout.expert) * _EXPOSED
        if layout.zero == 3:
            gathered = 3 * _WEIGHTS * self._held(layout)
            exposed += max(0.0, gathered / self._rate(layout.tensor * layout.data) - 0.7 * compute)
        step = (compute + exposed) * (microbatches + (layout.pipeline - 1) / layout.virtual)
        if layout.pipeline > 1:
            sent = 2 * 2 * tokens * self._h / layout.tensor * layout.virtual * microbatches
            step += sent / self._rate(space.gpus) * 0.2
        if layout.data * layout.context > 1:
            reduced = (_GRADIENTS + _WEIGHTS) * self._held(layout) * (microbatches if layout.zero == 2 else 1)
            hidden = 0.6 * compute
            step += max(0.1 * reduced / self._rate(space.gpus), reduced / self._rate(space.gpus) - hidden)
        return step

    def _held(self, layout: Layout) -> float:
        """Returns the parameters of a rank."""
        count, layers = self._count, self._layers / layout.pipeline
        dense = count.total - self._count.expert_layers * count.experts
        return dense / layout.pipeline / layout.tensor + layers * self._sparse * count.experts / layout.expert

    def _rate(self, ranks: int) -> float:
        return self._rates.nvlink if ranks <= self._space.domain else self._rates.network


def _bytes(zero: int, shards: int) -> float:
    """Returns the bytes of a parameter on each of `shards` data parallel ranks."""
    state = _STATE / shards if zero >= 1 else _STATE
    gradients = _GRADIENTS / shards if zero >= 2 else _GRADIENTS
    return state + gradients + (_WEIGHTS / shards if zero == 3 else _WEIGHTS)


def _count_of(space: Space, vocab_size: int) -> ParameterCount:
    learned = space.flags.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    flags = dict(space.flags)
    flags.setdefault("num_attention_heads", flags.get("mamba_num_heads") or 1)
    return parameter_count(flags, vocab_size, space.seq_length if learned else 0)
