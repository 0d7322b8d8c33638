"""How long a step of a run takes, with the measurement or data sheet behind each part, and the error that follows.

The work of each pipeline stage is counted from the config (layer_work.py), a GPU's rates turn it into seconds
(kernel_time.py), communication that nothing hides is added (exposed.py, data_parallel.py), and the simulator of the
pipeline schedules finds how long ranks wait. No model is built and nothing communicates.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.core.distributed.sharding_strategy import sharding_strategy_of
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.schedules import schedule_of
from megatron.core.pipeline_parallel.simulator import Costs, Timeline
from megatron.core.pipeline_parallel.stage_map import StageMap, StageModules, stage_map
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.layer_patterns import described_layer, layer_parts
from megatron.data.tokenizer.build import padded_vocab_size
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.data_parallel import RankWeights, muon_products, step_end
from megatron.diagnosis.planning.exposed import Exposed, exposed_of
from megatron.diagnosis.planning.figures import Figure, total
from megatron.diagnosis.planning.gpus import Gpu
from megatron.diagnosis.planning.kernel_time import Passes, elementwise_rate, passes_of
from megatron.diagnosis.planning.layer_work import check_is_known, stage_work
from megatron.diagnosis.planning.schedule_time import busy_of_ranks, schedule_time
from megatron.diagnosis.planning.work import Work
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.log.throughput import flops_of_samples
from megatron.training.setup.set_up import resolve_auto_layout

_STEP = Figure(2e-3, "2 ms of Python between steps: an estimate", 0.5)
_GRAPH = Figure(1e-4, "0.1 ms to start a CUDA graph: an estimate", 0.5)
_LAUNCHES_OF_EXPERTS, _LAUNCHES_OF_FP8 = 2.1, 2.3
"""Time in which a host starts the kernels of a layer, in terms of that of a dense layer in bf16."""
_UNEVEN = Figure(1.2, "experts' work of the busiest of two expert parallel ranks, bench.py MOE64/ep2-allgather", 0.15)
HOST, BUBBLE, OPTIMIZER, DATA, STEP = "waiting for the host", "bubble", "optimizer", "data parallel", "between steps"
MUON = "products of Muon"
DOCUMENTS = "uneven documents"


@dataclass(frozen=True)
class StepTime:
    """The time of a step and its parts, in seconds, on the rank that computes longest."""

    parts: Mapping[str, Figure]
    """By name: products, attention, choice of keys, scans, memory-bound operations, casts to fp8, waiting for the host,
    exposed communication by kind (tensor, context, expert, data parallel), bubble, uneven documents, optimizer,
    products of Muon, between steps."""
    bubble: float
    """The fraction of all ranks' time in the schedule in which they wait."""
    tokens: int
    """Tokens of a step."""
    flops: float
    """Model FLOPs of a step, as the log counts them."""
    gpus: int
    peak: Figure | None
    """FLOP/s that `mfu` refers to."""
    steps: int
    """Steps of the run; 0 if its length is not given."""
    weights: int
    """Elements of all weights of products and embeddings."""
    active_weights: int
    """Those that one token uses."""
    schedule: Schedule
    timeline: Timeline
    """The first micro-batches if there are many, and a shorter pipeline if it is long."""

    @cached_property
    def seconds(self) -> Figure:
        """Time of a step."""
        return total(self.parts.values())

    @property
    def tokens_per_second(self) -> Figure:
        """Tokens a second of all GPUs."""
        return self._rate(self.tokens)

    @property
    def tokens_per_second_per_gpu(self) -> Figure:
        """Tokens a second of one GPU."""
        return self._rate(self.tokens / self.gpus)

    @property
    def tflops(self) -> Figure:
        """Model TFLOP/s of a GPU."""
        return self._rate(self.flops / self.gpus / 1e12)

    @property
    def mfu(self) -> Figure | None:
        """Model FLOPs utilisation; None without a known peak."""
        if self.peak is None:
            return None
        rate = self._rate(self.flops / self.gpus / self.peak.value)
        return dataclasses.replace(rate, source=f"{rate.source}; {self.peak.source}")

    @property
    def days(self) -> Figure | None:
        """Time of all steps, without evaluation, saving and failures; None if the length of the run is not given."""
        return self.seconds.times(self.steps / 86400) if self.steps else None

    @property
    def gpu_hours(self) -> Figure | None:
        """GPU-hours of all steps."""
        return self.seconds.times(self.steps * self.gpus / 3600) if self.steps else None

    def part(self, name: str) -> Figure:
        """Returns a part; 0 seconds if the step has none."""
        return self.parts.get(name, Figure(0.0, "no such work"))

    def _rate(self, work: float) -> Figure:
        return dataclasses.replace(self.seconds, value=work / self.seconds.value)


@dataclass(frozen=True)
class _Stage:
    """A micro-batch on one stage."""

    work: Work
    passes: Sequence[Passes]
    exposed: Sequence[Exposed]
    costs: Costs
    host: Figure
    """Time in which the GPU waits for its host."""

    @property
    def busy(self) -> float:
        """Seconds of forward and backward."""
        return self.costs.forward + self.costs.input_gradient + self.costs.weight_gradient


def step_time(
    config: PretrainConfig,
    cluster: Cluster,
    vocab_rows: int | None = None,
    document_tokens: float | None = None,
    uneven: float = 1.0,
) -> StepTime:
    """Predicts the time of a step. `vocab_rows` is the padded vocabulary; by default it follows from --vocab-size.
    `document_tokens` is the mean length of the document of a token, if attention keeps documents apart; `uneven` the
    attention of the slowest ranks, divided by the mean.

    Takes less than a second for any number of ranks. Raises UserError if a figure has no measurement or data sheet to
    rest on, or if the model's work is not counted yet.
    """
    check_is_known(config)
    rows = vocab_rows or _vocab_rows(config)
    config, _ = resolve_auto_layout(config, rows)
    training, length = config.training, config.data.seq_length
    assert length is not None
    batches = BatchSchedule.from_config(training, config.grid.data, length).final_num_microbatches
    stages = stage_map(config.transformer)
    found = _stages(config, stages, cluster, rows, document_tokens)
    schedule = schedule_of(config.transformer, pipeline_of(config.transformer), batches)
    costs = [stage.costs for stage in found]
    times, busy_ranks = schedule_time(schedule, costs), busy_of_ranks(schedule, costs)
    busiest = busy_ranks.index(max(busy_ranks))
    own = [found[index] for index in _of_rank(stages, busiest)]
    parts = _parts(own, batches)
    busy = sum(part.value for part in parts.values())
    waits = max(0.0, times.seconds - busy)
    if stages.num_stages > 1:
        parts[BUBBLE] = Figure(waits, "the simulated schedule", total(parts.values()).error)
    if uneven > 1:
        parts[DOCUMENTS] = uneven_documents(parts, uneven)
    casts = [parts["casts to fp8"], _weight_casts(own, cluster.gpu)]
    parts |= {"casts to fp8": total(casts)} if casts[1].value else {}
    parts |= _end_parts(config, cluster, stages, found, busiest, batches, rows)
    return StepTime(
        parts={name: part for name, part in parts.items() if part.value},
        bubble=times.bubble if stages.num_stages > 1 else 0.0,
        tokens=training.global_batch_size * length,
        flops=flops_of_samples(config, rows, training.global_batch_size),
        gpus=config.world_size,
        peak=cluster.gpu.peak(config.transformer.fp8 is not None),
        steps=_steps(config),
        weights=_weights(config, found, rows, active=False),
        active_weights=_weights(config, found, rows, active=True),
        schedule=times.schedule,
        timeline=times.timeline,
    )


def uneven_documents(parts: Mapping[str, Figure], uneven: float) -> Figure:
    """Returns the time that a step with these parts takes longer if the attention of the slowest ranks is so many times
    the mean."""
    attention = parts.get("attention", Figure(0.0, "no attention"))
    source = f"simulated rows of the run's documents; {attention.source}"
    return Figure(attention.value * (uneven - 1), source, attention.error + 0.1)


def _vocab_rows(config: PretrainConfig) -> int:
    size = config.tokenizer.vocab_size
    if size is None:
        raise UserError("the size of the vocabulary is not known without the tokenizer: give --vocab-size")
    size += config.tokenizer.family == "NullTokenizer" and config.tokenizer.null_tokenizer_eod_id is None
    return padded_vocab_size(
        size, config.model.make_vocab_size_divisible_by, config.transformer.tensor_model_parallel_size
    )


def _steps(config: PretrainConfig) -> int:
    training = config.training
    if training.train_samples is not None:
        return -(-training.train_samples // training.global_batch_size)
    return training.train_iters


# ---------------------------------------------------------------------------------------------------------------------
# Stages


def _of_rank(stages: StageMap, rank: int) -> list[int]:
    return [stages.stage_index(rank, chunk) for chunk in range(stages.chunks)]


def _stages(
    config: PretrainConfig, stages: StageMap, cluster: Cluster, rows: int, document_tokens: float | None
) -> list[_Stage]:
    pipeline_ranks = config.grid.group(0, ("pp",))
    found: list[_Stage] = []
    known: dict[object, _Stage] = {}
    for stage in stages.stages:
        place = pipeline_ranks[stages.locate(stage.index)[0]]
        after = pipeline_ranks[stages.locate(min(stage.index + 1, stages.num_stages - 1))[0]]
        node = cluster.gpus_per_node
        key = (*_contents(config, stage), place // node == after // node)
        if key not in known:
            work = stage_work(config, stage, rows, document_tokens)
            known[key] = _stage(config, stage, work, cluster, place, after)
        found.append(known[key])
    return found


def _contents(config: PretrainConfig, stage: StageModules) -> tuple[object, ...]:
    """Returns a key that stages of equal work share."""
    alike = config.transformer.hybrid_layer_pattern is None and len(stage.layers) > 0
    kinds: object = stage.index
    if alike:
        parts = ((layer_parts(config.transformer, n), described_layer(config.transformer, n)) for n in stage.layers)
        kinds = tuple(parts)
    uniform = config.transformer.window_size is None and config.transformer.attention_chunk_size is None
    uniform = uniform and not config.transformer.first_last_layers_bf16 and config.transformer.no_rope_freq is None
    return kinds, stage.embedding, stage.loss, stage.prediction_layers, uniform or stage.index


def _stage(config: PretrainConfig, stage: StageModules, work: Work, cluster: Cluster, place: int, after: int) -> _Stage:
    passes = [_uneven(config, each, work, cluster) for each in passes_of(work, cluster.gpu)]
    attention = next(each.whole for each in passes if each.kind == "attention")
    exposed = exposed_of(config, stage, work, cluster, attention, place)
    passes = _recomputed(config, passes, exposed, stage)
    forward = sum(each.forward.value for each in passes) + sum(each.forward.value for each in exposed)
    inputs = sum(each.input_gradient.value for each in passes) + sum(each.backward.value for each in exposed)
    weights = sum(each.weight_gradient.value for each in passes)
    launches = _launches(config, work, cluster)
    parts = (launches.value / 3, launches.value / 3, launches.value / 3)
    if config.adapters.lora_rank is not None:  # backward is one part, without the products of frozen weights
        parts = (launches.value / 3, launches.value * 2 / 3 - weights, 0.0)
    waits = [max(0.0, part - own) for part, own in zip(parts, (forward, inputs, weights), strict=True)]
    if stage.index == 0 and after == place:  # one stage: the host is ahead in one pass and late in another
        waits = [max(0.0, launches.value - forward - inputs - weights), 0.0, 0.0]
    message = 0.0
    if after != place:
        item, split = config.transformer.params_dtype.itemsize, config.transformer.tensor_model_parallel_size
        assert config.data.seq_length is not None
        tokens = config.training.micro_batch_size * config.data.seq_length // config.transformer.context_parallel_size
        sent = tokens * config.transformer.hidden_size * item / (split if config.transformer.sequence_parallel else 1)
        message = cluster.message_seconds(sent, place, after).value
    costs = Costs(forward + waits[0], inputs + waits[1], weights + waits[2], message)
    return _Stage(work, passes, exposed, costs, Figure(sum(waits), launches.source, launches.error))


def _launches(config: PretrainConfig, work: Work, cluster: Cluster) -> Figure:
    """Returns the time in which the host starts the kernels of a micro-batch."""
    transformer = config.transformer
    if transformer.cuda_graph_impl == "local" or transformer.enable_cuda_graph:
        return _GRAPH
    each = cluster.gpu.layer_launch
    factor = _LAUNCHES_OF_FP8 if transformer.fp8 is not None else 1.0
    experts = any(product.experts for product in work.products)
    return each.times(work.layers * max(factor, _LAUNCHES_OF_EXPERTS if experts else 1.0))


def _uneven(config: PretrainConfig, each: Passes, work: Work, cluster: Cluster) -> Passes:
    """Returns the products of a rank whose experts have more tokens than those of others."""
    if config.grid.expert == 1 or each.kind != "products":
        return each
    flops = sum(count * product.flops for product, count in work.products.items())
    experts = sum(count * product.flops for product, count in work.products.items() if product.experts)
    factor = 1 + (_UNEVEN.value - 1) * experts / max(1.0, flops)
    return Passes(
        each.kind, each.forward.times(factor), each.input_gradient.times(factor), each.weight_gradient.times(factor)
    )


def _recomputed(
    config: PretrainConfig, passes: Sequence[Passes], exposed: Sequence[Exposed], stage: StageModules
) -> list[Passes]:
    """Returns the passes with the forward that backward repeats."""
    transformer = config.transformer
    again = dict.fromkeys((each.kind for each in passes), 0.0)
    if transformer.recompute_granularity == "full":
        layers = len(stage.layers)
        chosen = layers
        if transformer.recompute_method == "block":
            chosen = min(layers, transformer.recompute_num_layers or 1)
        again = dict.fromkeys(again, chosen / layers if layers else 0.0)
    elif transformer.recompute_granularity == "selective":
        modules = transformer.recompute_modules or ["core_attn"]
        again["attention"] = float("core_attn" in modules)
        again["memory-bound operations"] = 0.5 if set(modules) & {"layernorm", "mlp_act", "moe_act"} else 0.0
        again["products"] = 0.7 if set(modules) & {"mlp", "moe"} else 0.0
    if (transformer.mlp_chunks_for_training or 1) > 1:
        again["products"] = max(again["products"], 0.7)
    return [
        dataclasses.replace(each, input_gradient=total([each.input_gradient, each.forward.times(again[each.kind])]))
        for each in passes
    ]


def _parts(found: Sequence[_Stage], batches: int) -> dict[str, Figure]:
    """Returns the parts of the micro-batches of a rank with these stages."""
    parts: dict[str, list[Figure]] = {}
    for stage in found:
        wholes = [(each.kind, each.whole) for each in stage.passes]
        wholes += [(each.kind, each.whole) for each in stage.exposed]
        for kind, whole in wholes:
            parts.setdefault(kind, []).append(whole.times(batches))
        parts.setdefault(HOST, []).append(stage.host.times(batches))
    return {name: total(figures) for name, figures in parts.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps


def _end_parts(
    config: PretrainConfig,
    cluster: Cluster,
    stages: StageMap,
    found: Sequence[_Stage],
    rank: int,
    batches: int,
    rows: int,
) -> dict[str, Figure]:
    """Returns what a step adds to its micro-batches on the ranks that hold the most weights."""
    most, end, muon = -1.0, None, Figure(0.0, "no such products")
    has_adapters, gathers = config.adapters.lora_rank is not None, sharding_strategy_of(config.ddp).shards_weights
    embedding = rows // config.transformer.tensor_model_parallel_size * config.transformer.hidden_size
    for place in {0, stages.pipeline_size - 1, rank}:
        own = [found[index] for index in _of_rank(stages, place)]
        held = sum(stages.stages[index].embedding for index in _of_rank(stages, place))
        dense, experts = _elements(own, held * embedding, trained=False)
        trained = _elements(own, 0 if has_adapters else held * embedding, trained=True)
        layers = sum(stage.work.layers for stage in own)
        if has_adapters and not gathers:
            largest = sum(trained) / max(1, layers)
        else:
            largest = max(held * embedding, (dense - held * embedding + experts) / max(1, layers))
        if dense + experts <= most:
            continue
        most = dense + experts
        last = sum(stage.busy - stage.costs.forward for stage in own)
        first = sum(stage.costs.forward for stage in own)
        ranks = config.grid.group(0, ("pp",))
        weights = RankWeights(*trained, largest, dense - trained[0], experts - trained[1])
        end = step_end(config, cluster, weights, ranks[place], last, first, batches)
        if "muon" in config.optimizer.optimizer:
            muon = muon_products(config, cluster.gpu, _matrices(own, rows), ranks[place])
    assert end is not None
    return {DATA: end.exposed, OPTIMIZER: end.update, MUON: muon, STEP: _STEP}


def _elements(found: Sequence[_Stage], embedding: int, trained: bool) -> tuple[int, int]:
    """Returns the elements of weights of dense layers with the embedding, and of experts; `trained`: not of frozen
    ones."""
    dense, experts = (sum(stage.work.weights(kind, trained) for stage in found) for kind in (False, True))
    return dense + embedding, experts


def _matrices(found: Sequence[_Stage], vocab_rows: int) -> Counter[tuple[int, int]]:
    """Returns the number of weights of each shape [outputs, inputs] in layers."""
    matrices: Counter[tuple[int, int]] = Counter()
    for stage in found:
        for product, count in stage.work.products.items():
            if product.outputs != vocab_rows:  # Adam updates the head
                shape = product.outputs, product.inputs
                matrices[shape] += count * (product.weights if product.experts else 1)
    return matrices


def _weight_casts(found: Sequence[_Stage], gpu: Gpu) -> Figure:
    """Returns the time in which weights are cast to fp8, once a step: each is read once and written in both layouts."""
    weights = sum(
        count * product.inputs * product.outputs * product.weights
        for stage in found
        for product, count in stage.work.products.items()
        if product.fp8
    )
    return elementwise_rate(gpu).per(4 * weights)


def _weights(config: PretrainConfig, found: Sequence[_Stage], rows: int, active: bool) -> int:
    """Returns the elements of the model's weights of products and embeddings, or of those that one token uses."""
    grid, transformer = config.grid, config.transformer
    whole = 0.0
    for stage in found:
        dense = stage.work.weights(experts=False) * grid.tensor
        experts = stage.work.weights(experts=True) * grid.axis_size("etp") * grid.expert
        chosen = transformer.moe_router_topk / (transformer.num_moe_experts or 1) if active else 1.0
        whole += dense + experts * chosen
    if config.model.untie_embeddings_and_output_weights:
        whole += rows * transformer.hidden_size
    return round(whole)
