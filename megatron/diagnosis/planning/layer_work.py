"""The work of each pipeline stage, computed from the run's config: no model is built.

benchmarks/recorder.py records the same work from a micro-batch that runs; the tests compare the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.core.adapters.costs import adapters_of_layer
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stage_map import StageModules
from megatron.core.transformer.config.hybrid import mamba_heads
from megatron.core.transformer.layer_costs import keys_seen
from megatron.core.transformer.layer_patterns import described_layer, has_rope, layer_parts, with_sizes_of
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.diagnosis.planning.work import AttentionWork, Product, Selection, Work
from megatron.training.config.pretrain_config import PretrainConfig


@dataclass(frozen=True)
class Sizes:
    """What a rank has of a micro-batch."""

    run: PretrainConfig
    document_tokens: float | None = None
    """Mean length of the document of a token, if attention keeps documents apart; None: whole rows."""

    @property
    def config(self) -> TransformerConfig:
        """The config of the layers."""
        return self.run.transformer

    @property
    def tensor(self) -> int:
        """Tensor parallel size."""
        return self.config.tensor_model_parallel_size

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a context parallel rank."""
        length = self.run.data.seq_length
        assert length is not None
        return self.run.training.micro_batch_size * length // self.config.context_parallel_size

    @cached_property
    def own_tokens(self) -> int:
        """Tokens between the products of a layer: with sequence parallelism only this rank's."""
        return self.tokens // (self.tensor if self.config.sequence_parallel else 1)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self.config.params_dtype

    @property
    def is_frozen(self) -> bool:
        """Whether only adapters are trained."""
        return self.run.adapters.lora_rank is not None

    @property
    def row(self) -> int:
        """Bytes of the hidden state of a token."""
        return self.config.hidden_size * self.dtype.itemsize

    def is_fp8(self, number: int) -> bool:
        """Whether the products of a layer are in fp8."""
        config = self.config
        if config.fp8 is None:
            return False
        last = config.num_layers - config.num_layers_at_end_in_bf16
        edge = number <= config.num_layers_at_start_in_bf16 or number > last
        return not (config.first_last_layers_bf16 and edge)


def check_is_known(run: PretrainConfig) -> None:
    """Raises UserError for models whose work is not counted here."""
    transformer = run.transformer
    if transformer.num_encoder_layers:
        raise UserError("the time of an encoder-decoder model is not predicted: its work is not counted yet")
    if "muon" in run.optimizer.optimizer and run.grid.tensor * run.grid.expert > 1:
        raise UserError(
            f"--optimizer {run.optimizer.optimizer}: the time of its products is not predicted with tensor or expert "
            "parallelism, of which no measurement exists; that of adam is"
        )
    numbers = range(1, transformer.num_layers + (transformer.mtp_num_layers or 0) + 1)
    mixers = {layer_parts(transformer, number).token_mixer for number in numbers}
    if "dsa" in mixers:
        _check_sparse_attention_is_known(transformer)
    emulated = "--fp4-format" if transformer.fp4 is not None else "--fp8-recipe mxfp8"
    if transformer.fp4 is not None or (transformer.fp8 is not None and transformer.fp8_recipe == "mxfp8"):
        raise UserError(
            f"the time of {emulated} is not predicted: it is emulated, and refused by GPUs before Blackwell"
        )
    if run.ddp.exact_gradient_sums:
        raise UserError(
            "the time of --exact-data-parallel-sums is not predicted: it was 1.6 to 1.7 times that of the run without"
        )


def _check_sparse_attention_is_known(config: TransformerConfig) -> None:
    if config.context_parallel_size > 1:
        raise UserError(
            f"--context-parallel-size {config.context_parallel_size}: the time of sparse attention (dsa) is not "
            "predicted with context parallelism: no measurement of it exists; that of 1 is"
        )
    if isinstance(config, MLATransformerConfig) and config.dsa_indexer_loss_coeff:
        raise UserError(
            f"--dsa-indexer-loss-coeff {config.dsa_indexer_loss_coeff}: the time of the indexer's loss is not "
            "predicted: no measurement of it exists; that of a run without the loss is"
        )


def stage_work(run: PretrainConfig, stage: StageModules, vocab_rows: int, document_tokens: float | None = None) -> Work:
    """Returns the work of a micro-batch on a rank of a stage. `vocab_rows` is the padded vocabulary; `document_tokens`
    as in `Sizes`."""
    sizes, work, config = Sizes(run, document_tokens), Work(), run.transformer
    depths = range(config.num_layers + 1, config.num_layers + 1 + stage.prediction_layers)
    known: dict[object, Work] = {}
    for number in (*stage.layers, *depths):
        key = _kind(config, number)
        if key not in known:
            known[key] = layer_work(sizes, number)
        work.add(known[key])
    tokens, own, row = sizes.tokens, sizes.own_tokens, sizes.row
    if stage.embedding:
        _embedding(work, sizes)
        if run.model.position_embedding_type == "learned_absolute":
            _embedding(work, sizes)
    for _ in depths:
        work.products[Product(tokens, 2 * config.hidden_size, config.hidden_size // sizes.tensor, sizes.dtype)] += 1
        work.move("norms", 3 * 2 * own * row, 3 * 3 * own * row)
        _embedding(work, sizes)
        _head(work, sizes, vocab_rows)
    if stage.loss:
        work.move("norms", 2 * own * row, 3 * own * row)
        if run.is_bidirectional:
            work.products[Product(tokens, config.hidden_size, config.hidden_size, sizes.dtype)] += 1
        _head(work, sizes, vocab_rows)
    if sizes.is_frozen:
        work.freeze()
        for number in (*stage.layers, *depths):
            _adapters(work, sizes, number)
    return work


def _kind(config: TransformerConfig, number: int) -> object:
    """Returns a key that layers of equal work share."""
    fp8 = config.fp8 is not None and config.first_last_layers_bf16 and number
    window = keys_seen(config, number, 1 << 16)
    return layer_parts(config, number), described_layer(config, number), window, has_rope(config, number), fp8


def _embedding(work: Work, sizes: Sizes) -> None:
    own, row = sizes.own_tokens, sizes.row
    # Backward adds the rows to a float32 gradient.
    backward = 0 if sizes.is_frozen else own * row + 8 * own * sizes.config.hidden_size
    work.move("embedding", 2 * own * row, backward)


def _head(work: Work, sizes: Sizes, vocab_rows: int) -> None:
    rows = vocab_rows // sizes.tensor
    work.products[Product(sizes.tokens, sizes.config.hidden_size, rows, sizes.dtype)] += 1
    logits = sizes.tokens * rows * sizes.dtype.itemsize
    work.move("cross entropy", logits, logits)


def layer_work(sizes: Sizes, number: int) -> Work:
    """Returns the work of a layer (counted from 1)."""
    work = Work(layers=1)
    mixer, channels = layer_parts(sizes.config, number)
    config = with_sizes_of(sizes.config, described_layer(sizes.config, number))
    for part in (mixer, channels):
        if part is not None:
            _norm_and_residual(work, sizes)
    if mixer is not None:
        _MIXERS[mixer](work, sizes, config, number)
    if channels == "moe":
        _experts(work, sizes, config, number)
    elif channels == "mlp":
        assert config.ffn_hidden_size
        _mlp(work, sizes, config, number, config.ffn_hidden_size)
    elif channels == "linear":
        _linear(work, sizes, config, number)
    return work


def _norm_and_residual(work: Work, sizes: Sizes) -> None:
    size, config = sizes.own_tokens * sizes.row, sizes.config
    norms = 2 if config.norm_placement == "sandwich" else 1
    work.move("norms", norms * 2 * size, norms * 3 * size, kernels=3 * norms)
    backward = 1 + config.add_bias_linear + (2 if config.hidden_dropout else 0)
    work.move("residuals", 3 * size, backward * size, kernels=2 + config.add_bias_linear)


def _linear(work: Work, sizes: Sizes, config: TransformerConfig, number: int) -> None:
    h = config.hidden_size
    work.products[Product(sizes.tokens, h, h // sizes.tensor, sizes.dtype, sizes.is_fp8(number))] += 1


# ---------------------------------------------------------------------------------------------------------------------
# Token mixers


def _attention(work: Work, sizes: Sizes, config: TransformerConfig, number: int) -> None:
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        return _latent_attention(work, sizes, config, number)
    assert config.kv_channels and config.num_query_groups
    tokens, tensor, fp8, item = sizes.tokens, sizes.tensor, sizes.is_fp8(number), sizes.dtype.itemsize
    heads, groups = config.num_attention_heads // tensor, max(1, config.num_query_groups // tensor)
    queries, keys = heads * config.kv_channels, groups * config.kv_channels
    gates = queries if config.attention_output_gate else 0
    h = config.hidden_size
    work.products[Product(tokens, h, queries + gates + 2 * keys, sizes.dtype, fp8)] += 1
    work.products[Product(tokens, queries, h, sizes.dtype, fp8)] += 1
    if config.add_bias_linear or config.add_qkv_bias:
        work.move("biases", 0, tokens * (queries + gates + 2 * keys) * item)
    if config.qk_layernorm:
        size = tokens * (queries + keys) * item
        work.move("norms", 2 * size, 3 * size)
    if sizes.run.model.position_embedding_type == "rope" and has_rope(config, number):
        size = tokens * (queries + keys) * item
        work.move("rotary positions", 2 * size, 2 * size)
    _attend(work, sizes, number, heads, config.kv_channels, config.kv_channels)


def _latent_attention(work: Work, sizes: Sizes, config: MLATransformerConfig, number: int) -> None:
    tokens, fp8, item = sizes.tokens, sizes.is_fp8(number), sizes.dtype.itemsize
    heads, h = config.num_attention_heads // sizes.tensor, config.hidden_size
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    down, up = config.kv_lora_rank, config.qk_head_dim + config.v_head_dim
    shapes = [(h, down + config.qk_pos_emb_head_dim), (down, heads * up), (heads * config.v_head_dim, h)]
    if config.q_lora_rank is None:
        shapes.append((h, heads * width))
    else:
        shapes += [(h, config.q_lora_rank), (config.q_lora_rank, heads * width)]
    for inputs, outputs in shapes:
        work.products[Product(tokens, inputs, outputs, sizes.dtype, fp8)] += 1
    if config.qk_layernorm:
        size = tokens * (down + (config.q_lora_rank or heads * width)) * item
        work.move("norms", 2 * size, 3 * size)
    positions = tokens * (heads + 1) * config.qk_pos_emb_head_dim * item
    work.move("rotary positions", 2 * positions, 2 * positions)
    # Queries and keys are put together from two parts each, and their gradients are taken apart.
    parts = 2 * tokens * heads * width * item
    work.move("heads of latent attention", 2 * parts, 2 * parts)
    _attend(work, sizes, number, heads, width, config.v_head_dim)


def _attend(work: Work, sizes: Sizes, number: int, heads: int, width: int, value_width: int) -> None:
    length, context = sizes.run.data.seq_length, sizes.config.context_parallel_size
    assert length is not None
    seen = length if sizes.run.is_bidirectional else keys_seen(sizes.config, number, length)
    if sizes.document_tokens is not None:
        seen = min(seen, round(sizes.document_tokens / 2))
    selects = _selects_keys(sizes, number)
    work.attention[AttentionWork(sizes.tokens, seen, heads, width, value_width, context, selects)] += 1


def _selects_keys(sizes: Sizes, number: int) -> bool:
    """Whether queries of a layer see fewer keys than their row has, because an indexer selects them."""
    config, length = sizes.config, sizes.run.data.seq_length
    if layer_parts(config, number).token_mixer != "dsa":
        return False
    assert isinstance(config, MLATransformerConfig) and config.dsa_indexer_topk and length
    return length > config.dsa_indexer_topk


def _sparse_attention(work: Work, sizes: Sizes, config: TransformerConfig, number: int) -> None:
    """Adds latent attention and its indexer, which has all heads on every tensor parallel rank. Without a loss of its
    own the indexer has no backward."""
    assert isinstance(config, MLATransformerConfig) and config.dsa_indexer_n_heads and config.dsa_indexer_head_dim
    _latent_attention(work, sizes, config, number)
    tokens, fp8, h = sizes.tokens, sizes.is_fp8(number), config.hidden_size
    heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
    for inputs, outputs in ((config.q_lora_rank or h, heads * width), (h, width), (h, heads)):
        work.products[Product(tokens, inputs, outputs, sizes.dtype, fp8, backward=(False, False))] += 1
    row = tokens * width * sizes.dtype.itemsize
    work.move("norms", 2 * row, 0, kernels=1)
    work.move("rotary positions", 2 * (heads + 1) * row, 0)
    if _selects_keys(sizes, number):
        assert sizes.run.data.seq_length is not None
        work.selections[Selection(tokens, sizes.run.data.seq_length, heads, width)] += 1


def _mamba(work: Work, sizes: Sizes, config: TransformerConfig, number: int) -> None:
    tokens, tensor, fp8, item = sizes.tokens, sizes.tensor, sizes.is_fp8(number), sizes.dtype.itemsize
    heads = mamba_heads(config) // tensor
    channels, groups = heads * config.mamba_head_dim, max(1, config.mamba_num_groups // tensor)
    mixed = channels + 2 * groups * config.mamba_state_dim
    h = config.hidden_size
    work.products[Product(tokens, h, channels + mixed + heads, sizes.dtype, fp8)] += 1
    work.products[Product(tokens, channels, h, sizes.dtype, fp8)] += 1
    work.move("convolutions", 2 * tokens * mixed * item, 3 * tokens * mixed * item)
    work.move("gates and norms", 3 * tokens * channels * item, 5 * tokens * channels * item)
    work.states["mamba"] += tokens * channels * config.mamba_state_dim


def _gated_delta_net(work: Work, sizes: Sizes, config: TransformerConfig, number: int) -> None:
    tokens, tensor, fp8, item = sizes.tokens, sizes.tensor, sizes.is_fp8(number), sizes.dtype.itemsize
    assert config.linear_num_key_heads and config.linear_num_value_heads
    assert config.linear_key_head_dim and config.linear_value_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim // tensor
    keys = config.linear_num_key_heads * config.linear_key_head_dim // tensor
    mixed, h = 2 * keys + values, config.hidden_size
    heads = config.linear_num_value_heads // tensor
    work.products[Product(tokens, h, mixed + values + 2 * heads, sizes.dtype, fp8)] += 1
    work.products[Product(tokens, values, h, sizes.dtype, fp8)] += 1
    work.move("convolutions", 2 * tokens * mixed * item, 3 * tokens * mixed * item)
    work.move("gates and norms", 3 * tokens * values * item, 5 * tokens * values * item)
    work.states["gated_delta_net"] += tokens * values * config.linear_key_head_dim


_MIXERS: dict[str, Callable[[Work, Sizes, TransformerConfig, int], None]] = {
    "attention": _attention,
    "dsa": _sparse_attention,
    "mamba": _mamba,
    "gated_delta_net": _gated_delta_net,
    "linear": _linear,
}
"""For each token mixer of `layer_patterns.LayerParts`: adds its work to that of its layer."""


# ---------------------------------------------------------------------------------------------------------------------
# Channel mixers


def _mlp(work: Work, sizes: Sizes, config: TransformerConfig, number: int, width: int) -> None:
    """Adds an MLP of `width` channels in the whole."""
    fp8, own = sizes.is_fp8(number), width // sizes.tensor
    outputs = own * (2 if config.gated_linear_unit else 1)
    work.products[Product(sizes.tokens, config.hidden_size, outputs, sizes.dtype, fp8)] += 1
    work.products[Product(sizes.tokens, own, config.hidden_size, sizes.dtype, fp8)] += 1
    _activation(work, sizes, sizes.tokens, outputs, own)


def _activation(work: Work, sizes: Sizes, rows: int, inputs: int, outputs: int) -> None:
    read, written = rows * inputs * sizes.dtype.itemsize, rows * outputs * sizes.dtype.itemsize
    work.move("activations", read + written, 2 * read + written)


def _experts(work: Work, sizes: Sizes, config: TransformerConfig, number: int) -> None:
    """Adds the router, the experts of this rank and the shared experts. Every rank gets equally many tokens."""
    grid, tokens, fp8 = sizes.run.grid, sizes.own_tokens, sizes.is_fp8(number)
    assert config.num_moe_experts and config.moe_ffn_hidden_size
    split = grid.axis_size("etp")
    channels, width = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size // split
    local = config.num_moe_experts // grid.expert
    work.products[Product(tokens, config.hidden_size, config.num_moe_experts, sizes.dtype)] += 1
    if config.moe_latent_size:
        work.products[Product(tokens, config.hidden_size, channels, sizes.dtype)] += 1
        work.products[Product(tokens, channels, config.hidden_size, sizes.dtype)] += 1
    rows = _rows_of_experts(sizes)
    outputs = width * (2 if config.gated_linear_unit else 1)
    work.products[Product(rows, channels, outputs, sizes.dtype, fp8, experts=True, weights=local)] += 1
    work.products[Product(rows, width, channels, sizes.dtype, fp8, experts=True, weights=local)] += 1
    _activation(work, sizes, rows, outputs, width)
    moved = 2 * (rows + tokens) * channels * sizes.dtype.itemsize  # there and back
    work.move("permutation", moved, moved)
    if config.moe_shared_expert_intermediate_size:
        _mlp(work, sizes, config, number, config.moe_shared_expert_intermediate_size)


def _rows_of_experts(sizes: Sizes) -> int:
    """Returns the rows of the experts of this rank."""
    config = sizes.config
    rows = sizes.own_tokens * config.moe_router_topk * sizes.run.grid.axis_size("etp")
    if config.moe_expert_capacity_factor is not None and config.moe_pad_expert_input_to_capacity:
        rows = round(rows * config.moe_expert_capacity_factor)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


def _adapters(work: Work, sizes: Sizes, number: int) -> None:
    """Adds the adapters of a layer: two products each, the sum with the layer's output, and in backward the sum with
    the gradient of the layer's input. Dropout and DoRA's norms are not counted."""
    grid, rank, item = sizes.run.grid, sizes.run.adapters.lora_rank, sizes.dtype.itemsize
    assert rank is not None
    for adapter in adapters_of_layer(sizes.run.adapters, sizes.config, number):
        layer = adapter.layer
        split = grid.axis_size("etp") if layer.of_experts else sizes.tensor
        inputs, outputs = (
            size // (split if layer.split == side else 1)
            for side, size in (("columns", layer.columns), ("rows", adapter.rows))
        )
        read = written = _rows_of_experts(sizes) if layer.of_experts else sizes.tokens
        if not layer.of_experts and layer.split != "columns":
            read = sizes.own_tokens
        if layer.split == "none":
            written = sizes.own_tokens
        own = (sizes.config.num_moe_experts or 1) // grid.expert if layer.of_experts else 1
        for shape in ((read, inputs, rank), (written, rank, outputs)):
            work.products[Product(*shape, sizes.dtype, experts=layer.of_experts, weights=own)] += 1
        work.move("adapters", 3 * written * outputs * item, 3 * read * inputs * item)
