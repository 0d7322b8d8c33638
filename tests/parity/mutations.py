"""Known bugs of layouts, each as a change of one line of the product, and the test that catches it.

Each leaves one process right, keeps everything finite and lets the loss fall. `caught_by` is a cell: the test
`tests/parity/test_layouts.py::test_layout[caught_by]`. docs/parity.md has the table, which a test keeps true.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A bug: in `file` (below megatron/), `before` becomes `after`. It must stand there exactly once."""

    name: str
    story: str
    """What is wrong, in words."""
    file: str
    before: str
    after: str
    caught_by: str
    quick: bool = False
    """Planted in every run of the tests, not only in the slow ones."""


_TENSOR = [
    Mutation(
        "final-norm-not-summed",
        "the gradient of the last norm under sequence parallelism is left a sum over a rank's own tokens",
        "core/distributed/finalize_model_grads.py",
        "if axis in info.partial_gradient_axes]",
        'if axis in info.partial_gradient_axes and "final_layernorm" not in info.name]',
        "llama-gqa/sp2/per-token",
        quick=True,
    ),
    Mutation(
        "row-bias-not-summed",
        "so is that of the bias of a row parallel layer",
        "core/tensor_parallel/layers.py",
        'partial = frozenset({"tp"} if self.sequence_parallel else ())',
        "partial = frozenset()",
        "gpt2/sp2/default",
    ),
    Mutation(
        "positions-not-summed",
        "so is that of learned positions",
        "core/models/common/embeddings/language_model_embedding.py",
        'partial = frozenset({"tp"} if self.scatters else ())',
        "partial = frozenset()",
        "gpt2/sp2/default",
    ),
    Mutation(
        "head-norm-not-summed",
        "the gradient of the norms of queries and keys is that of a rank's own heads",
        "core/transformer/attention.py",
        "if group_size(tp_group) > 1 and not of_all_heads:",
        "if False:",
        "qknorm/tp2/per-token",
    ),
    Mutation(
        "shared-keys-not-summed",
        "key and value rows that tensor parallel ranks have in common get the gradient of one rank's heads",
        "core/transformer/shared_key_values.py",
        '{"partial_gradient_axes": frozenset({"tp"})}',
        "{}",
        "mqa/tp2/default",
    ),
    Mutation(
        "input-gradient-not-summed",
        "backward of a column parallel layer does not sum the gradient of its input",
        "core/ops/linear.py",
        "else start_all_reduce(gradient, group)",
        "else Pending(gradient, None)",
        "llama-gqa/tp2/per-token",
    ),
    Mutation(
        "padding-in-the-softmax",
        "the rows that round a vocabulary up take part in the softmax",
        "core/ops/cross_entropy.py",
        "min(max(vocab_size - first, 0), columns)",
        "columns",
        "llama-gqa/tp2/per-token",
        quick=True,
    ),
    Mutation(
        "label-by-maximum",
        "the logit of the label is the largest that any rank gives, where all but one give zero",
        "core/ops/cross_entropy.py",
        "sums[0].sum(0)",
        "sums[0].amax(0)",
        "llama-gqa/tp2/per-token",
    ),
    Mutation(
        "masks-alike-on-ranks",
        "under sequence parallelism every rank drops as the first one does",
        "core/transformer/layer_inputs.py",
        "dropout.index.chunk(group_size(group))[group_rank(group)]",
        "dropout.index.chunk(group_size(group))[0]",
        "gpt2/sp2/default",
    ),
    Mutation(
        "masks-alike-on-heads",
        "every tensor parallel rank drops probabilities as those of the first heads are",
        "core/transformer/dot_product_attention.py",
        "self.first_head = local_heads * group_rank(groups.tp)",
        "self.first_head = 0",
        "gpt2/tp2/default",
    ),
    Mutation(
        "start-alike-on-ranks",
        "sibling ranks draw the same initial weights",
        "core/parameters.py",
        "(info.box.start[0] if info.box.start else 0) * row_size",
        "0",
        "llama-gqa/tp2/per-token",
    ),
    Mutation(
        "norm-counts-copies",
        "what all tensor parallel ranks have counts once for each of them in the gradient norm",
        "core/distributed/replicas.py",
        "return all(groups.rank(_GROUP_OF_AXIS[axis]) == 0 for axis in model_axes)",
        "return True",
        "llama-gqa/tp2/per-token",
    ),
]

_PIPELINE = [
    Mutation(
        "norm-of-a-stage",
        "the gradient norm, by which is clipped, leaves the other pipeline stages out",
        "core/optimizer/clip_grads.py",
        '{"dense": "mp", "expert": "tp_ep_pp"}',
        '{"dense": "tp", "expert": "tp_ep_pp"}',
        "llama-gqa/pp2/per-token",
    ),
    Mutation(
        "tied-counted-twice",
        "both copies of a tied embedding count in the gradient norm",
        "core/distributed/replicas.py",
        "if info.tied and groups.rank(info.tied_over) != 0:",
        "if False:",
        "gpt2/pp2/default",
        quick=True,
    ),
    Mutation(
        "tied-not-summed",
        "embedding and head keep a gradient each, of a weight that they share",
        "core/distributed/finalize_model_grads.py",
        "_sum_together([copies[key][0] for key in sorted(copies) if key[0] == group], groups, group)",
        "pass",
        "gpt2/pp2/default",
    ),
    Mutation(
        "tied-not-summed-on-a-rank",
        "where one rank has both copies of a tied embedding, that of the later stage is overwritten",
        "core/distributed/finalize_model_grads.py",
        "            first.add_(other)",
        "            pass",
        "gpt2/pp2-zb-v/default",
    ),
    Mutation(
        "head-starts-by-itself",
        "the head's copy of a tied embedding is drawn under a name of its own",
        "core/models/gpt/gpt_model.py",
        'copy = {"tied": True, "part_of": "embedding.word_embeddings.weight"} if is_copied else {}',
        'copy = {"tied": True} if is_copied else {}',
        "gpt2/pp2/default",
    ),
    Mutation(
        "stage-scaled-twice",
        "the gradient that a stage receives is divided by the number of micro-batches once more",
        "core/pipeline_parallel/runner.py",
        "self._gradients.pop((number, chunk)).wait().to(kept.dtype)",
        "self._gradients.pop((number, chunk)).wait().to(kept.dtype) / self.task.num_microbatches",
        "mqa/pp2/default",
        quick=True,
    ),
    Mutation(
        "tokens-of-a-stage",
        "every pipeline stage divides by the tokens that it knows of",
        "core/distributed/finalize_model_grads.py",
        'for name in ("pp", "dp_cp"):',
        'for name in ("dp_cp",):',
        "llama-gqa/pp2/per-token",
    ),
    Mutation(
        "late-product-forgotten",
        "of the weight gradients that are put off, the last of a micro-batch is not computed",
        "core/distributed/sinks.py",
        "in enumerate(products):",
        "in enumerate(products[:-1]):",
        "llama-gqa/pp2-zb-h1/per-token",
    ),
]

_CONTEXT = [
    Mutation(
        "normalised-by-local-tokens",
        "a context parallel rank divides its loss by its own tokens",
        "core/pipeline_parallel/losses.py",
        "return all_reduce(tokens.clone(), self.groups.cp)",
        "return tokens",
        "gpt2/cp2-p2p/default",
        quick=True,
    ),
    Mutation(
        "not-reduced-over-context",
        "gradients are not summed over context parallel ranks",
        "core/distributed/placements.py",
        '_DATA_GROUP = {"dense": "dp_cp", "expert": "expt_dp"}',
        '_DATA_GROUP = {"dense": "dp", "expert": "expt_dp"}',
        "llama-gqa/cp2-p2p/per-token",
    ),
    Mutation(
        "averaged-over-data-alone",
        "gradients are divided by the data parallel ranks and not by those that share a sequence",
        "core/distributed/distributed_data_parallel.py",
        'scale = 1.0 if per_token else 1.0 / self.pg_collection.size("dp_cp")',
        'scale = 1.0 if per_token else 1.0 / self.pg_collection.size("dp")',
        "gpt2/cp2-p2p/default",
    ),
    Mutation(
        "positions-of-the-part",
        "positions count from the first token that a rank holds",
        "core/tokens.py",
        "torch.cat([index[:length] + first * length, index[:length] + second * length])",
        "index",
        "packed/cp2-a2a/per-token",
    ),
    Mutation(
        "merged-by-maximum",
        "attention to two blocks of keys is merged by the larger of their sums",
        "core/ops/attention_blocks.py",
        "merged = torch.logaddexp(total_lse, lse)",
        "merged = torch.maximum(total_lse, lse)",
        "llama-gqa/cp2-p2p/per-token",
    ),
    Mutation(
        "keys-gradient-not-returned",
        "in the ring the gradient of keys that were lent is dropped",
        "core/context_parallel/exchanges.py",
        "lambda rows: total[turn.given].add_(rows)",
        "lambda rows: total",
        "llama-gqa/cp2-p2p/per-token",
    ),
    Mutation(
        "keys-gradient-of-one",
        "gathered keys get the gradient of one rank",
        "core/context_parallel/exchanges.py",
        "torch.sum(rows.unflatten(0, (ranks, -1)), 0, dtype=at_least_float32(rows.dtype))",
        "rows.unflatten(0, (ranks, -1))[0].to(at_least_float32(rows.dtype))",
        "llama-gqa/cp2-all_gather/per-token",
    ),
    Mutation(
        "heads-not-counted-on",
        "after the all-to-all every rank takes its heads for the first ones",
        "core/context_parallel/attention.py",
        "first_head=call.first_head + first",
        "first_head=call.first_head",
        "gpt2/cp2-a2a/default",
    ),
    Mutation(
        "window-across-chunks",
        "a sliding window is counted in the rows that a rank holds, not in the sequence",
        "core/context_parallel/tiles.py",
        "offset = keys.place - queries.place",
        "offset = keys.first_row - queries.first_row",
        "window-sink/cp2-p2p/per-token",
    ),
    Mutation(
        "documents-of-the-part",
        "documents are told apart by the place of a token in its block",
        "core/ops/attention_blocks.py",
        "documents = [document_of(index, call.cu_seqlens) for index in (i + place.query_place, j + place.key_place)]",
        "documents = [document_of(index, call.cu_seqlens) for index in (i, j)]",
        "packed/cp2-p2p/per-token",
    ),
    Mutation(
        "sink-in-every-block",
        "heads of another rank stand in the sinks of a rank",
        "core/context_parallel/attention.py",
        "call.sink.narrow(0, first, heads)",
        "call.sink.narrow(0, 0, heads)",
        "window-sink/cp2-a2a/per-token",
    ),
]

_DATA = [
    Mutation(
        "reduced-in-bf16",
        "gradients travel in bfloat16, whatever the flag says",
        "core/distributed/buckets.py",
        "return unit.plan.main_dtype if reduce_in_main_dtype else unit.plan.dtype",
        "return torch.bfloat16",
        "llama-gqa/dp2/per-token",
        quick=True,
    ),
    Mutation(
        "tokens-of-a-rank",
        "with a loss per token each data parallel rank divides by its own tokens",
        "core/distributed/finalize_model_grads.py",
        'for name in ("pp", "dp_cp"):',
        'for name in ("pp",):',
        "llama-gqa/dp2/per-token",
    ),
    Mutation(
        "norm-of-a-shard",
        "under a sharded optimizer each rank clips by the norm of what it owns",
        "core/optimizer/clip_grads.py",
        'return "intra_dist_opt", sharding.replica_group if sharding.instances > 1 else None',
        'return "mp", None',
        "llama-gqa/dp2-optim/per-token",
    ),
    Mutation(
        "stale-weights",
        "whole weights stay as they were before the update of their shards",
        "core/distributed/unit_memory.py",
        "self._is_stale = self.sharding.shards > 1",
        "self._is_stale = False",
        "llama-gqa/dp2-optim/per-token",
    ),
    Mutation(
        "gradient-of-the-last-micro-batch",
        "where gradients are sharded, each micro-batch's take the place of those before",
        "core/distributed/gradient_shards.py",
        "self.owned.add_(self._sum.wait())",
        "self.owned.copy_(self._sum.wait())",
        "llama-gqa/dp2-optim_grads/per-token",
        quick=True,
    ),
    Mutation(
        "replicas-not-summed",
        "replicas of shards do not sum their gradients",
        "core/distributed/buckets.py",
        "            if self.reductions.replicas is not None:\n                self._replica_sums",
        "            if False:\n                self._replica_sums",
        "llama-gqa/dp4-hybrid/per-token",
    ),
]

_LATENT = [
    Mutation(
        "shared-key-not-summed",
        "the part of the keys that all heads of latent attention share gets the gradient of one rank's heads",
        "core/transformer/multi_latent_attention.py",
        "copy_to_tensor_model_parallel_region(shared_key.contiguous(), self.tp_group)",
        "shared_key.contiguous()",
        "mla-packed/tp2/default",
        quick=True,
    ),
    Mutation(
        "whole-weight-not-summed",
        "under sequence parallelism weights that every rank holds whole, as those down to latents, get the gradient of "
        "its own tokens",
        "core/tensor_parallel/replicated.py",
        'frozenset({"tp"} if config.sequence_parallel else ())',
        "frozenset()",
        "mla-yarn/sp2/per-token",
    ),
]

_LOSSES = "core/transformer/moe/auxiliary_losses.py"
_ROUTER = "core/transformer/moe/router.py"

_ROUTERS = [
    Mutation(
        "balance-loss-by-ranks",
        "the balance loss of experts counts once for each tensor parallel rank",
        _LOSSES,
        "(experts.shape[1] * share.total**2)",
        "(experts.shape[1] * share.total * share.count)",
        "moe-aux/sp2/default",
        quick=True,
    ),
    Mutation(
        "balance-of-own-tokens",
        "it looks at the choices of the tokens that a rank has, not at those of the micro-batch",
        _LOSSES,
        "chosen = all_reduce(count_choices(experts, scores.shape[1]), share.group).to(scores.dtype)",
        "chosen = count_choices(experts, scores.shape[1]).to(scores.dtype)",
        "moe-aux/cp2-p2p/default",
    ),
    Mutation(
        "z-loss-of-own-tokens",
        "the loss that keeps logits small is a mean over a rank's tokens, and so counts once for each rank",
        _LOSSES,
        "max(share.total, 1)",
        "max(share.count, 1)",
        "moe-sinkhorn/sp2/per-token",
    ),
    Mutation(
        "sequences-of-a-rank",
        "balance within a sequence looks at the part of it that a rank has",
        _LOSSES,
        "chosen = all_reduce(count_choices(cell, samples * num_experts), share.group)",
        "chosen = count_choices(cell, samples * num_experts)",
        "moe-seq/cp2-a2a/default",
    ),
    Mutation(
        "capacity-of-a-rank",
        "each rank has a capacity of its own and drops by its own tokens alone",
        _ROUTER,
        "share.own(within_capacity(share.gather(experts), capacity, wish, order))",
        "within_capacity(experts, math.ceil(capacity / share.ranks), None if wish is None else weights.detach(), None)",
        "moe-capacity/cp2-p2p/per-token",
        quick=True,
    ),
    Mutation(
        "evened-out-by-a-rank",
        "Sinkhorn evens out the tokens of a rank, not those of the micro-batch",
        _ROUTER,
        "share.own(sinkhorn(share.gather(logits.double().exp())))",
        "sinkhorn(logits.double().exp())",
        "moe-sinkhorn/sp2/default",
    ),
    Mutation(
        "jitter-alike-on-ranks",
        "every rank multiplies its tokens by the noise of the first ones",
        "core/transformer/moe/micro_batch.py",
        "index=self.cut(numbers.index)",
        "index=numbers.index[: self.count]",
        "moe-capacity/sp2/per-token",
    ),
    Mutation(
        "router-not-summed",
        "under sequence parallelism the router's gradient is that of a rank's own tokens",
        _ROUTER,
        'frozenset({"tp"} if config.sequence_parallel else ())',
        "frozenset()",
        "moe-aux/sp2/default",
    ),
    Mutation(
        "bias-by-own-counts",
        "each rank moves the experts' bias by what its own tokens chose",
        "core/distributed/expert_balance.py",
        "all_reduce(counts, groups.tp_dp_cp)",
        "pass",
        "moe-bias/dp2/per-token",
        quick=True,
    ),
]

_EXPERTS = [
    Mutation(
        "experts-averaged-over-their-copies",
        "gradients of experts are divided by the ranks that hold a copy, though they are sums over the tokens of all",
        "core/distributed/distributed_data_parallel.py",
        "Reduction(self._group(sharding.data_group), scale, average)",
        "Reduction(self._group(sharding.data_group), 1.0 / self.pg_collection.size(sharding.data_group), average)",
        "moe-aux/dp2+ep2/default",
        quick=True,
    ),
    Mutation(
        "norm-of-own-experts",
        "the gradient norm leaves the experts of other ranks out",
        "core/optimizer/clip_grads.py",
        '{"dense": "mp", "expert": "tp_ep_pp"}',
        '{"dense": "mp", "expert": "mp"}',
        "moe-aux/dp2+ep2/per-token",
    ),
    Mutation(
        "experts-alike-on-ranks",
        "each rank takes its experts for the first ones",
        "core/transformer/moe/experts.py",
        'groups.rank("ep") * count',
        "0",
        "moe-bias/dp2+ep2/per-token",
    ),
    Mutation(
        "bias-on-every-rank",
        "the bias of an expert's second product is added by each of the ranks that share its channels",
        "core/transformer/moe/experts.py",
        "if bias is not None and not self.adds_bias:",
        "if False:",
        "moe-seq/sp2/per-token",
        quick=True,
    ),
    Mutation(
        "shared-experts-twice",
        "what all tokens' experts give is added once for each tensor parallel rank",
        "core/transformer/moe/moe_layer.py",
        "shared.added_to(output).view(hidden_states.shape)",
        'torch.lerp(output, shared.added_to(output), float(self.pg_collection.size("tp"))).view(hidden_states.shape)',
        "moe-bias/sp2/default",
    ),
    Mutation(
        "gate-not-summed",
        "under sequence parallelism their gate gets the gradient of a rank's own tokens",
        "core/transformer/moe/shared_experts.py",
        'frozenset({"tp"} if config.sequence_parallel else ())',
        "frozenset()",
        "moe-bias/sp2/default",
    ),
]

_PREDICTING = [
    Mutation(
        "ahead-within-the-part",
        "tokens further on are looked for among those that a context parallel rank has",
        "core/context_parallel/ahead.py",
        "return torch.stack(following, 2)",
        "return torch.zeros_like(torch.stack(following, 2))",
        "mtp-learned/cp2-p2p/default",
        quick=True,
    ),
    Mutation(
        "ahead-across-documents",
        "where documents end is looked up by the place of a token among a rank's own",
        "core/context_parallel/ahead.py",
        "    ends = tokens.cu_seqlens[1:].to(torch.int64)",
        "    ends, index = tokens.cu_seqlens[1:].to(torch.int64), torch.arange(tokens.seq_length, device=device)",
        "mtp-packed/cp2-p2p/default",
    ),
    Mutation(
        "predictions-by-local-tokens",
        "the loss of tokens further on is divided by a context parallel rank's own",
        "core/models/common/predictions.py",
        "all_reduce(torch.stack([mask.sum(dtype=torch.float64) for mask in masks]), cp_group)",
        "torch.stack([mask.sum(dtype=torch.float64) for mask in masks])",
        "mtp-learned/cp2-a2a/default",
    ),
    Mutation(
        "third-copy-not-summed",
        "the copy of the embedding beside the layers that predict further on keeps a gradient of its own",
        "core/models/gpt/gpt_model.py",
        "tied=positions_tied or (shares and not post_process),",
        "tied=not positions_tied and shares and not post_process,",
        "mtp-learned/pp2/default",
    ),
]

_BLOCKS = "core/ops/attention_blocks.py"

_KNOBS = [
    Mutation(
        "cap-missing-in-the-ring",
        "scores are bounded by one kernel and not by that of split rows",
        _BLOCKS,
        "if variant.cap is not None:",
        "if False:",
        "gemma/cp2-p2p/default",
        quick=True,
    ),
    Mutation(
        "cap-missing-in-its-gradient",
        "there their gradient is that of scores without a bound",
        _BLOCKS,
        "score_gradient if slope is None else score_gradient * slope",
        "score_gradient",
        "gemma/cp2-all_gather/per-token",
    ),
    Mutation(
        "distances-in-the-block",
        "there ALiBi counts distances from the first key at hand",
        _BLOCKS,
        "distance = (j + place.key_place) - (i + place.query_place)[:, None]",
        "distance = j - i[:, None]",
        "falcon/cp2-p2p/default",
    ),
    Mutation(
        "rates-of-the-first-heads",
        "every tensor parallel rank has the ALiBi rates of the first heads",
        "core/ops/attention.py",
        "self.slopes[first_head : first_head + heads]",
        "self.slopes[:heads]",
        "falcon/tp2/per-token",
    ),
    Mutation(
        "norm-of-all-heads-not-summed",
        "where ranks share a head of keys, a norm over all heads gets the gradient of a rank's own queries",
        "core/transformer/query_key_norms.py",
        'facts = {"partial_gradient_axes": frozenset({"tp"})}',
        "facts = {}",
        "olmo/tp4/default",
    ),
]

MUTATIONS = [*_TENSOR, *_PIPELINE, *_CONTEXT, *_DATA, *_KNOBS, *_LATENT, *_ROUTERS, *_EXPERTS, *_PREDICTING]
