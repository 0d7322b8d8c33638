"""Known bugs of routers and experts."""

from parity.mutations.mutation import Mutation

_LOSSES = "core/transformer/moe/auxiliary_losses.py"
_ROUTER = "core/transformer/moe/router.py"

ROUTERS = [
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
        "core/transformer/moe/micro_batch_share.py",
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
        "core/distributed/finalize_model_grads.py",
        "all_reduce(counts, groups.tp_dp_cp)",
        "pass",
        "moe-bias/sp2/default",
        quick=True,
    ),
]

EXPERTS = [
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
