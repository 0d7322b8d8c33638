"""Known bugs of pipelines."""

from parity.mutations.mutation import Mutation

PIPELINE = [
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
        "core/distributed/sharding_strategy.py",
        "if info.tied and groups.rank(info.tied_over) != 0:",
        "if False:",
        "gpt2/pp2/default",
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
        "core/distributed/main_grad.py",
        "in enumerate(products):",
        "in enumerate(products[:-1]):",
        "llama-gqa/pp2-zb-h1/per-token",
    ),
]
