"""Known bugs of pipelines."""

from parity.mutations.mutation import Mutation

PIPELINE = [
    Mutation(
        "norm-of-one-stage",
        "the gradient norm for clipping covers only the rank's own pipeline stage",
        "core/optimizer/clip_grads.py",
        '{"dense": "mp", "expert": "tp_ep_pp"}',
        '{"dense": "tp", "expert": "tp_ep_pp"}',
        "llama-gqa/pp2/per-token",
    ),
    Mutation(
        "tied-weight-counted-twice",
        "the gradient norm counts both copies of a tied embedding",
        "core/distributed/sharding_strategy.py",
        "if info.tied and groups.rank(info.tied_over) != 0:",
        "if False:",
        "gpt2/pp2/default",
    ),
    Mutation(
        "tied-gradients-not-summed",
        "the gradients of embedding and head are not summed although their weights are tied",
        "core/distributed/finalize_model_grads.py",
        "_sum_together([copies[key][0] for key in sorted(copies) if key[0] == group], groups, group)",
        "pass",
        "gpt2/pp2/default",
    ),
    Mutation(
        "tied-gradients-not-summed-on-one-rank",
        "if one rank holds both copies of a tied embedding, the gradient of the second copy is lost",
        "core/distributed/finalize_model_grads.py",
        "            first.add_(other)",
        "            pass",
        "gpt2/pp2-zb-v/default",
    ),
    Mutation(
        "untied-initial-head",
        "the head's copy of a tied embedding gets its own random initial values",
        "core/models/common/language_model_head.py",
        'copy = {"tied": True, "part_of": "embedding.word_embeddings.weight"} if is_copied else {}',
        'copy = {"tied": True} if is_copied else {}',
        "gpt2/pp2/default",
    ),
    Mutation(
        "received-gradient-scaled-twice",
        "a pipeline stage divides the gradient that it receives by the number of micro-batches a second time",
        "core/pipeline_parallel/runner.py",
        "self._gradients.pop((number, chunk)).wait().to(kept.dtype)",
        "self._gradients.pop((number, chunk)).wait().to(kept.dtype) / self.task.num_microbatches",
        "mqa/pp2/default",
    ),
    Mutation(
        "tokens-of-one-stage",
        "each pipeline stage divides gradients by the tokens that it counted, though only the last stage counts any",
        "core/distributed/finalize_model_grads.py",
        'for name in ("pp", "dp_cp"):',
        'for name in ("dp_cp",):',
        "llama-gqa/pp2/per-token",
    ),
    Mutation(
        "deferred-weight-gradient-lost",
        "the last deferred weight gradient of each micro-batch is not computed",
        "core/distributed/main_grad.py",
        "in enumerate(products):",
        "in enumerate(products[:-1]):",
        "llama-gqa/pp2-zb-h1/per-token",
    ),
]
