"""Known bugs of data parallelism and of what it shards."""

from parity.mutations.mutation import Mutation

DATA = [
    Mutation(
        "reduced-in-bf16",
        "gradients travel in bfloat16, and the flag is ignored",
        "core/distributed/buckets.py",
        "return unit.plan.main_dtype if reduce_in_main_dtype else unit.plan.dtype",
        "return torch.bfloat16",
        "llama-gqa/dp2/per-token",
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
        "core/distributed/flat_buffer.py",
        "self._is_stale = self.sharding.shards > 1",
        "self._is_stale = False",
        "llama-gqa/dp2-optim/per-token",
    ),
    Mutation(
        "gradient-of-the-last-micro-batch",
        "where gradients are sharded, each micro-batch's take the place of those before",
        "core/distributed/reduce_scatter_gradients.py",
        "self.shard.add_(self._sum.wait())",
        "self.shard.copy_(self._sum.wait())",
        "llama-gqa/dp2-optim_grads/per-token",
        quick=True,
    ),
    Mutation(
        "replicas-not-summed",
        "replicas of shards do not sum their gradients",
        "core/distributed/buckets.py",
        "            if self.reduction.replicas is not None:\n                self._replica_sums",
        "            if False:\n                self._replica_sums",
        "llama-gqa/dp4-hybrid/per-token",
    ),
]
