"""Known bugs of data parallelism and of sharded optimizers."""

from parity.mutations.mutation import Mutation

DATA = [
    Mutation(
        "reduced-in-bf16",
        "gradients are always reduced in bfloat16, also without the flag",
        "core/distributed/buckets.py",
        "return unit.plan.main_dtype if reduce_in_main_dtype else unit.plan.dtype",
        "return torch.bfloat16",
        "llama-gqa/dp2/per-token",
    ),
    Mutation(
        "tokens-of-one-data-rank",
        "with the per-token loss each data parallel rank divides gradients by its own tokens",
        "core/distributed/finalize_model_grads.py",
        'for name in ("pp", "dp_cp"):',
        'for name in ("pp",):',
        "llama-gqa/dp2/per-token",
    ),
    Mutation(
        "norm-of-one-shard",
        "with a distributed optimizer each rank clips by the norm of its own shard",
        "core/optimizer/clip_grads.py",
        'return "intra_dist_opt", sharding.replica_group if sharding.instances > 1 else None',
        'return "mp", None',
        "llama-gqa/dp2-optim/per-token",
    ),
    Mutation(
        "stale-weights",
        "updated weight shards are not gathered, so the next forward uses the old weights",
        "core/distributed/flat_buffer.py",
        "self._is_stale = self.sharding.shards > 1",
        "self._is_stale = False",
        "llama-gqa/dp2-optim/per-token",
    ),
    Mutation(
        "only-the-last-micro-batch",
        "sharded gradients are overwritten by each micro-batch instead of accumulated",
        "core/distributed/reduce_scatter_gradients.py",
        "total.add_(self._sum.wait())",
        "total.copy_(self._sum.wait())",
        "llama-gqa/dp2-optim_grads/per-token",
        quick=True,
    ),
    Mutation(
        "optimizer-instances-not-summed",
        "with several optimizer instances, gradient shards are not summed over the instances",
        "core/distributed/buckets.py",
        "            if self.reduction.replicas is not None:\n                self._replica_sums",
        "            if False:\n                self._replica_sums",
        "llama-gqa/dp4-hybrid/per-token",
    ),
]
