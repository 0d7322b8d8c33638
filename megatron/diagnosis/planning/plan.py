"""Makes a plan of a specification: model, layout and settings, each with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.exact_cost import PlannedRun
from megatron.diagnosis.planning.hardware import cluster_of, gpu_of
from megatron.diagnosis.planning.layouts import MAX_BUBBLE, Space, refuse_contradictions
from megatron.diagnosis.planning.model_shape import ModelShape, shape_of
from megatron.diagnosis.planning.quantities import short
from megatron.diagnosis.planning.questions import tokenizer_ids
from megatron.diagnosis.planning.ranking import Candidate, Ranking, rank_layouts
from megatron.diagnosis.planning.rough_cost import Rates, RoughCost
from megatron.diagnosis.planning.settings_of_run import (
    EVAL_ITERS,
    PlannedSource,
    Setting,
    data_settings,
    layout_settings,
    model_settings,
    planned_sources,
    tokenizer_settings,
    training_settings,
)
from megatron.diagnosis.planning.specification import Specification
from megatron.diagnosis.planning.training_values import (
    OPTIMAL_TOKENS_PER_PARAMETER,
    TrainingValues,
    checkpoint_interval,
    training_values,
)

USUAL_UTILIZATION = 0.85
"""Part of a GPU's memory that a plan uses if nothing is specified."""

_PCIE = 10e9
"""Bytes a second of collectives over PCIe, for the rough order of layouts only."""

_BYTES_OF_CHECKPOINT = 14
"""Per parameter: bfloat16 weights, float32 main weights and two moments."""


@dataclass(frozen=True)
class Plan:
    """A run that is ready to be written down."""

    specification: Specification
    shape: ModelShape
    values: TrainingValues
    cluster: Cluster
    memory_limit: float
    """Bytes of a GPU that may be used."""
    ranking: Ranking
    sources: tuple[PlannedSource, ...]
    save_interval: int
    save_reason: str
    run: PlannedRun
    notes: tuple[str, ...]
    """What was assumed, and what a person should look at."""
    measured: str = ""
    """What was measured of the chosen layout (--measure)."""

    @property
    def chosen(self) -> Candidate:
        """The layout of the plan."""
        return self.ranking.best[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU, as predicted."""
        return _rate(self.specification, self.values, self.chosen)

    @property
    def loss_step(self) -> int:
        """Step of the gate on the loss."""
        check = self.specification.loss_check
        return min(check.step if check and check.step else 1000, self.values.train_iters)

    def sections(self) -> Mapping[str, list[Setting]]:
        """Returns the settings of run.yaml by heading, without those that depend on the output folder."""
        spec = self.specification
        return {
            "model": list(model_settings(self.shape, spec)),
            "training": list(training_settings(self.values, self.shape)),
            "layout": list(layout_settings(self.chosen.layout, self._layout_reasons())),
            "tokenizer and data": [
                *tokenizer_settings(spec, self.shape.vocab_size),
                *data_settings(spec, self.sources, self.values.global_batch_size, self.chosen.layout),
            ],
            "validation and checkpoints": [
                Setting("eval_interval", self.loss_step, self._loss_reason()),
                Setting("eval_iters", EVAL_ITERS, "validation batches; all evaluations read the same ones"),
                Setting("save_interval", self.save_interval, self.save_reason),
                Setting("log_interval", 10, "a log line waits for the device; ten steps keep that below 1%"),
                Setting("log_throughput", True, "the throughput gate reads it"),
            ],
        }

    def _loss_reason(self) -> str:
        spec = self.specification
        return spec.cite("loss_check") if spec.loss_check else "the loss at step 1,000, on validation data"

    def _layout_reasons(self) -> dict[str, str]:
        """Returns the reason of each layout flag: the line that sets it, or the rule by which it was chosen."""
        spec, layout, batch = self.specification, self.chosen.layout, self.values.global_batch_size
        chosen = self.chosen
        best = f"fastest of {self.ranking.considered:,} layouts, {chosen.seconds:.3g} s a step predicted"
        best = self.measured or best

        def reason(field: str, rule: str) -> str:
            return spec.cite(field) if spec.is_given(field) else rule

        memory = f"{chosen.memory / 1e9:.1f} GB of {self.memory_limit / 1e9:.1f} on the fullest rank"
        bubble = layout.bubble(batch)
        return {
            "": best,
            "tensor_model_parallel_size": reason(
                "tensor_parallel", f"{best}; at most the {self.cluster.gpus_per_nvlink_domain} GPUs that NVLink joins"
            ),
            "pipeline_model_parallel_size": reason(
                "pipeline_parallel",
                f"{best}; bubble {bubble:.1%} with {layout.num_microbatches(batch)} micro-batches"
                if layout.pipeline > 1
                else f"{best}; the model fits without stages, which would wait for each other",
            ),
            "context_parallel_size": reason("context_parallel", f"{best}; rows of {spec.seq_length:,} tokens"),
            "expert_model_parallel_size": reason("expert_parallel", best),
            "micro_batch_size": f"{best}; {memory}",
            "sequence_parallel": "divides the activations outside the matrix products too (arXiv:2205.05198)",
            "pipeline_model_parallel_layout": "stages of equal cost, embedding and head counted",
            "expert_tensor_parallel_size": "whole experts on a rank: larger matrix products than parts of them",
            "use_distributed_optimizer": reason("zero_stage", "ZeRO stage 1 first: state is shared, and no weights"),
            "data_parallel_sharding_strategy": reason("zero_stage", f"stage 1 does not fit; {memory}"),
            "use_megatron_fsdp": reason("zero_stage", f"ZeRO stage {layout.zero}: stage 1 does not fit"),
            "overlap_grad_reduce": "gradients are reduced behind the backward pass",
            "overlap_param_gather": "updated weights are gathered behind the next forward pass",
            **dict.fromkeys(
                ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
                f"without it a rank needs more than {self.memory_limit / 1e9:.1f} GB, or a slower layout",
            ),
        }


def make_plan(specification: Specification, global_batch_size: int | None = None, wanted: int = 3) -> Plan:
    """Returns the plan of a specification that leaves no question open, with the `wanted` best layouts. Raises
    UserError for contradictions, one a line, with the nearest values, and for a model that does not fit the GPUs."""
    spec = specification
    assert spec.params is not None and spec.seq_length is not None and spec.gpus is not None
    assert spec.gpu is not None and spec.tokens is not None
    gpu, _ = gpu_of(spec.gpu)
    assert gpu is not None
    cluster, notes = cluster_of(spec, gpu)
    vocab_size, more = _vocabulary(spec)
    shape = shape_of(spec.architecture, spec.params, vocab_size, spec.seq_length, spec.objective or "causal")
    values = training_values(shape, spec.tokens, spec.seq_length, spec.gpus, global_batch_size)
    space = Space(
        shape.flags, spec.seq_length, values.global_batch_size, spec.gpus, cluster.gpus_per_nvlink_domain, spec
    )
    refuse_contradictions(space)
    run = PlannedRun(
        [*model_settings(shape, spec), *training_settings(values, shape)],
        shape.vocab_size,
        shape.basis.family,
        cluster,
    )
    inside = gpu.collectives.value if gpu.collectives is not None else _PCIE
    rates = Rates(gpu.bf16_products.value, inside, cluster.link or (inside if gpu.nic is None else gpu.nic.value))
    rough = RoughCost(space, shape.vocab_size, rates)
    limit = gpu.memory.value * (spec.memory_utilization or USUAL_UTILIZATION)
    ranking = rank_layouts(space, rough, run, limit, wanted)
    if not ranking.best:
        raise UserError(_does_not_fit(spec, shape, ranking, limit))
    _refuse_impossible_rate(spec, values, ranking.best[0])
    interval, reason = _save_interval(spec, shape, ranking.best[0].seconds)
    return Plan(
        specification=spec,
        shape=shape,
        values=values,
        cluster=cluster,
        memory_limit=limit,
        ranking=ranking,
        sources=planned_sources(spec),
        save_interval=min(interval, values.train_iters),
        save_reason=reason,
        run=run,
        notes=(*notes, *more, *shape.notes, *_advice(spec, shape, values, ranking.best[0])),
    )


def _vocabulary(spec: Specification) -> tuple[int | None, list[str]]:
    """Returns the entries of the model's vocabulary. Raises UserError if the tokenizer does not fit them."""
    ids, entries = tokenizer_ids(spec), spec.vocab_size
    if entries is None or ids is None:
        return entries or ids, []
    cited = f"vocabulary size {entries:,} ({spec.where['vocab_size']})"
    if ids > entries:
        raise UserError(
            f"{cited} is less than the {ids:,} ids of the tokenizer ({spec.where['tokenizer']}), whose ids would be "
            f"out of range; nearest: {ids:,}"
        )
    if entries - ids > max(1024, entries // 100):
        raise UserError(
            f"{cited} is far more than the {ids:,} ids of the tokenizer ({spec.where['tokenizer']}), and "
            f"{entries - ids:,} entries would never be trained; nearest: {ids:,}"
        )
    return entries, [f"{cited}: {entries - ids:,} entries more than the tokenizer has ids"] if entries > ids else []


def _does_not_fit(spec: Specification, shape: ModelShape, ranking: Ranking, limit: float) -> str:
    if not ranking.considered:
        sizes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel")
        given = any(getattr(spec, size) is not None for size in sizes)
        way = (
            "leave one of the sizes to the planner (derive)" if given else "fewer GPUs, or a larger --global-batch-size"
        )
        return (
            f"no layout of {spec.gpus} GPUs has {'the given parallel sizes, ' if given else ''}"
            f"{shape.flags['num_layers']} layers and a batch that data parallel ranks divide; nearest: {way}"
        )
    closest = min(ranking.losers, key=lambda loser: loser.reason, default=None)
    refused = [loser.reason for loser in ranking.losers if loser.reason.startswith("refused")]
    if refused and len(refused) == len(ranking.losers) and ranking.least_memory <= limit:
        return f"no layout can be started; {refused[0]}"
    assert spec.gpus is not None
    factor = max(2, 1 << (ranking.least_memory / limit).__ceil__().bit_length() - 1)
    return (
        f"{short(shape.parameters)} parameters do not fit {spec.gpus} GPUs with {limit / 1e9:.1f} GB each: the "
        f"smallest of {ranking.considered:,} layouts needs about {max(ranking.least_memory, limit) / 1e9:.1f} GB"
        + (f" ({closest.layout.name}: {closest.reason})" if closest else "")
        + f"; nearest: {spec.gpus * factor} GPUs, or GPUs with more memory"
    )


def _save_interval(spec: Specification, shape: ModelShape, seconds: float) -> tuple[int, str]:
    if spec.checkpoint_interval is not None:
        return spec.checkpoint_interval, spec.cite("checkpoint_interval")
    assert spec.gpus is not None
    return checkpoint_interval(seconds, spec.gpus, _BYTES_OF_CHECKPOINT * shape.parameters)


def _rate(spec: Specification, values: TrainingValues, candidate: Candidate) -> float:
    """Returns the predicted tokens per second and GPU."""
    assert spec.seq_length is not None and spec.gpus is not None
    return values.global_batch_size * spec.seq_length / candidate.seconds / spec.gpus


def _refuse_impossible_rate(spec: Specification, values: TrainingValues, candidate: Candidate) -> None:
    """Raises UserError if the throughput target is beyond the peak of the GPU."""
    rate = _rate(spec, values, candidate)
    if spec.throughput is not None and (utilization := candidate.time.mfu * spec.throughput / rate) > 1:
        raise UserError(
            f"throughput target {spec.throughput:,.0f} tokens/s/GPU ({spec.where['throughput']}) is {utilization:.0%} "
            f"of the GPU's peak; nearest: {rate:,.0f}, which the plan predicts ({candidate.time.mfu:.0%} of it)"
        )


def _advice(spec: Specification, shape: ModelShape, values: TrainingValues, best: Candidate) -> list[str]:
    """Returns what a person should look at before the run starts."""
    found, layout, rate = [], best.layout, _rate(spec, values, best)
    if spec.throughput is not None and spec.throughput > rate:
        found.append(
            f"FLAG: throughput target {spec.throughput:,.0f} tokens/s/GPU ({spec.where['throughput']}): the plan "
            f"predicts {rate:,.0f}, {best.time.mfu:.0%} MFU; the target would take "
            f"{best.time.mfu * spec.throughput / rate:.0%}"
        )
    if spec.is_dynamic:
        found.append(
            "dynamic context parallelism: times are those of static rows; its gain depends on the documents' lengths, "
            "which a specification does not say"
        )
    assert spec.tokens is not None
    if spec.deduplication in (None, "none"):
        found.append(
            "FLAG: no deduplication method is specified: repeated documents are learned by heart and cost quality (Lee "
            "et al. 2022, arXiv:2107.06499); deduplicate, and say by which method"
        )
    if spec.zero_stage in (2, 3):
        found.append(f"FLAG: ZeRO stage {spec.zero_stage} is specified; stage 1 sends less, if it fits")
    if spec.checkpoint_interval is not None and spec.checkpoint_interval > 1000:
        found.append(
            f"FLAG: a checkpoint every {spec.checkpoint_interval:,} steps: the round trip within the first 1,000 steps "
            "is a step of the checklist of its own"
        )
    bubble = layout.bubble(values.global_batch_size)
    if bubble > MAX_BUBBLE:
        found.append(f"FLAG: pipeline ranks wait {bubble:.0%} of a step; more samples a step, or fewer stages, help")
    utilization = spec.memory_utilization or USUAL_UTILIZATION
    if spec.memory_utilization is None:
        found.append(f"max memory utilization: not specified; {USUAL_UTILIZATION:.0%} assumed")
    elif utilization > 0.95:
        found.append(
            f"FLAG: {utilization:.0%} of the memory leaves little room; a longer row or an uneven routing fails"
        )
    ratio = spec.tokens / shape.active_parameters
    found.append(
        f"{ratio:.3g} tokens per parameter; {OPTIMAL_TOKENS_PER_PARAMETER} are compute-optimal (arXiv:2203.15556), "
        "and more make a smaller model as good, which is cheaper at inference"
    )
    if spec.framework and not any(word in spec.framework.lower() for word in ("megatron", "this")):
        found.append(f"framework {spec.framework}: the plan is for this program's flags, which are Megatron-LM's")
    if spec.objective is None:
        found.append("training objective: not specified; causal LM assumed, as the architecture is a decoder")
    return found
