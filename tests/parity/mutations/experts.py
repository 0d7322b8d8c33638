"""Known bugs of routers and experts."""

from parity.mutations.mutation import Mutation

_LOSSES = "core/transformer/moe/auxiliary_losses.py"
_ROUTER = "core/transformer/moe/router.py"

ROUTERS = [
    Mutation(
        "balance-loss-once-per-rank",
        "the load-balancing loss counts once for each tensor parallel rank",
        _LOSSES,
        "(topk * share.routed_total**2)",
        "(topk * share.routed_total * share.count)",
        "moe-aux/sp2/default",
    ),
    Mutation(
        "balance-of-local-tokens",
        "the load-balancing loss counts the expert choices of a rank's own tokens, not of the whole micro-batch",
        _LOSSES,
        "all_reduce(counts.double(), share.group).to(sums.dtype)",
        "counts.to(sums.dtype)",
        "moe-aux/cp2-p2p/default",
    ),
    Mutation(
        "z-loss-of-local-tokens",
        "the router z-loss is averaged over a rank's own tokens and so counts once for each rank",
        _LOSSES,
        "max(share.total, 1)",
        "max(share.count, 1)",
        "moe-sinkhorn/sp2/per-token",
    ),
    Mutation(
        "sequence-balance-of-local-tokens",
        "the load-balancing loss per sequence counts only the rank's part of each sequence",
        _LOSSES,
        "chosen = all_reduce(count_experts(cell, samples * num_experts, share.real).double(), share.group)",
        "chosen = count_experts(cell, samples * num_experts, None).double()",
        "moe-seq/cp2-a2a/default",
    ),
    Mutation(
        "capacity-per-rank",
        "each rank applies an expert capacity of its own to its own tokens, not one capacity to the micro-batch",
        _ROUTER,
        "share.own(within_capacity(share.gather(wanted), capacity, wish, order))",
        "within_capacity(wanted, math.ceil(capacity / share.ranks), None if wish is None else weights.detach(), None)",
        "moe-capacity/cp2-p2p/per-token",
    ),
    Mutation(
        "sinkhorn-of-local-tokens",
        "Sinkhorn balances the tokens of a rank, not those of the micro-batch",
        _ROUTER,
        "share.own(sinkhorn(share.gather(logits.double().exp())))",
        "sinkhorn(logits.double().exp())",
        "moe-sinkhorn/sp2/default",
    ),
    Mutation(
        "same-jitter-on-ranks",
        "every rank multiplies its tokens by the router noise of the first rank's tokens",
        "core/transformer/moe/micro_batch_share.py",
        "index=self.cut(numbers.index)",
        "index=numbers.index[: self.count]",
        "moe-capacity/sp2/per-token",
    ),
    Mutation(
        "router-gradient-not-summed",
        "under sequence parallelism the router's gradient comes from a rank's own tokens only",
        "core/transformer/moe/base_router.py",
        'frozenset({"tp"} if config.sequence_parallel else ())',
        "frozenset()",
        "moe-aux/sp2/default",
    ),
    Mutation(
        "expert-bias-by-local-counts",
        "each rank updates the expert bias from the choices of its own tokens",
        "core/distributed/finalize_model_grads.py",
        "all_reduce(counts, groups.tp_dp_cp)",
        "pass",
        "moe-bias/dp2+recompute-shared+ep2-late/default",
    ),
]

EXPERTS = [
    Mutation(
        "expert-gradients-averaged",
        "gradients of experts are averaged over their replicas although they should be summed",
        "core/distributed/distributed_data_parallel.py",
        "scale = self._gradient_scale",
        "scale = 1.0 / self.pg_collection.size(sharding.data_group)",
        "moe-aux/dp2+ep2/default",
        quick=True,
    ),
    Mutation(
        "norm-of-local-experts",
        "the gradient norm leaves out the experts of other ranks",
        "core/optimizer/clip_grads.py",
        '{"dense": "mp", "expert": "tp_ep_pp"}',
        '{"dense": "mp", "expert": "mp"}',
        "moe-aux/dp2+ep2/per-token",
    ),
    Mutation(
        "same-initial-experts-on-ranks",
        "every expert parallel rank initialises its experts like those of the first rank",
        "core/transformer/moe/experts.py",
        'groups.rank("ep") * count',
        "0",
        "moe-bias/dp2+ep2/per-token",
    ),
    Mutation(
        "expert-bias-added-by-every-rank",
        "all ranks that share an expert's channels add the bias of its second matrix",
        "core/transformer/moe/experts.py",
        "if bias is not None and not self.adds_bias:",
        "if False:",
        "moe-seq/sp2/per-token",
    ),
    Mutation(
        "shared-experts-once-per-rank",
        "the output of shared experts is added once for each tensor parallel rank",
        "core/transformer/moe/moe_layer.py",
        "output = exchange.finish_combine()",
        "output = exchange.finish_combine()\n"
        "        more = shared.added_to(torch.zeros_like(output), read.gate_logits, None)\n"
        '        output = output + more * (self.pg_collection.size("tp") - 1)',
        "moe-bias/sp2/default",
    ),
    Mutation(
        "shared-expert-gate-not-summed",
        "under sequence parallelism the gradient of the shared experts' gate comes from a rank's own tokens only",
        "core/transformer/moe/shared_experts.py",
        'frozenset({"tp"} if config.sequence_parallel else ())',
        "frozenset()",
        "moe-bias/sp2/default",
    ),
]
