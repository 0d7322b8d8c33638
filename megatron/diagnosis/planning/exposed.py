"""The communication of a micro-batch on one rank: what computation hides, and what is exposed."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.context_parallel.comm_types import comm_type_of
from megatron.core.pipeline_parallel.stage_map import StageModules
from megatron.core.transformer.layer_patterns import layer_parts
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.figures import Figure, total
from megatron.diagnosis.planning.layer_work import Sizes
from megatron.diagnosis.planning.work import Work
from megatron.training.config.pretrain_config import PretrainConfig

_SLOWED = Figure(0.3, "communication slows the computation that hides it by 30% of its time: an estimate", 0.5)


@dataclass(frozen=True)
class Exposed:
    """Seconds of one kind of communication that no computation hides."""

    kind: str
    forward: Figure
    backward: Figure

    @property
    def whole(self) -> Figure:
        """Seconds of forward and backward."""
        return total([self.forward, self.backward])


def slowed_by(hidden: Figure) -> Figure:
    """Returns the time by which hidden communication slows the computation beside it."""
    return Figure(hidden.value * _SLOWED.value, _SLOWED.source, _SLOWED.error)


def exposed_of(
    run: PretrainConfig, stage: StageModules, work: Work, cluster: Cluster, attention: Figure, rank: int
) -> list[Exposed]:
    """Returns the exposed communication of a micro-batch on a stage. `attention` is the time of its attention, `rank` a
    rank that holds the stage."""
    found, grid = [], run.grid
    if grid.tensor > 1:
        found.append(_tensor_parallel(run, stage, cluster, grid.group(rank, ("tp",))))
    if grid.context > 1 and work.attention:
        found.append(_context_parallel(run, work, cluster, attention, grid.group(rank, ("cp",))))
    if grid.expert > 1 and any(product.experts for product in work.products):
        found.append(_expert_parallel(run, stage, cluster, grid.group(rank, ("ep",))))
    return found


def _tensor_parallel(run: PretrainConfig, stage: StageModules, cluster: Cluster, ranks: Sequence[int]) -> Exposed:
    """A unit is the gathering of the hidden states of all tokens. With sequence parallelism a pair of a column and a
    row parallel layer gathers its input and scatters its output in forward. In backward it gathers the output's
    gradient; gathering its input again and scattering the input's gradient run behind products. Without it, two
    all-reduces of two units each, of which the one of backward runs behind a weight gradient. Frozen weights have no
    such gradient: inputs are not gathered again, and nothing hides the sums of their gradients."""
    config, sizes = run.transformer, Sizes(run)
    unit = cluster.gather_seconds(sizes.tokens * sizes.row, ranks)
    pairs = sum(_column_row_pairs(run, number) for number in stage.layers) + stage.prediction_layers * 2
    ends = stage.embedding + 2 * (stage.loss + stage.prediction_layers)
    if config.sequence_parallel:
        forward, backward, hidden = 2.0 * pairs + ends / 2, 1.0 * pairs + ends / 2, 2.0 * pairs + ends / 2
    else:
        forward, backward, hidden = 2.0 * pairs + ends, ends / 2, 2.0 * pairs
    if run.adapters.lora_rank is not None:
        backward, hidden = backward + (pairs if config.sequence_parallel else 2.0 * pairs), hidden - 2.0 * pairs
    if config.tp_comm_overlap:
        # Products are cut into as many pieces as there are ranks; the communication of one piece is exposed.
        share = 1 / grid_size if (grid_size := len(ranks)) > 1 else 0.0
        hidden += (1 - share) * (2.0 * pairs + pairs)
        forward, backward = forward - (1 - share) * 2.0 * pairs, backward - (1 - share) * pairs
    slowed = slowed_by(unit.times(hidden))
    return Exposed("tensor parallel", unit.times(forward), total([unit.times(backward), slowed]))


def _column_row_pairs(run: PretrainConfig, number: int) -> int:
    """Returns how many pairs of a column and a row parallel layer a layer has."""
    config, parts = run.transformer, layer_parts(run.transformer, number)
    shared = bool(config.moe_shared_expert_intermediate_size)
    channels = parts.channel_mixer is not None and (parts.channel_mixer != "moe" or shared)
    return (parts.token_mixer is not None) + channels


def _context_parallel(
    run: PretrainConfig, work: Work, cluster: Cluster, attention: Figure, ranks: Sequence[int]
) -> Exposed:
    sizes = Sizes(run)
    kind = way_of_context(run)
    size, item = len(ranks), sizes.dtype.itemsize
    exchanged = bytes_of_keys(run) * work.attention.total()
    queries = 0.0
    for each, count in work.attention.items():
        queries += count * each.queries * each.heads * (each.width + each.value_width) * item
    if kind in ("a2a", "a2a+p2p"):
        once = cluster.exchange_seconds((exchanged + queries) * (size - 1) / size, ranks)
        return Exposed("context parallel", once, once)
    # A ring: each of the steps but the first computes with keys and values that arrive during the step before.
    sends = total(cluster.message_seconds(exchanged, a, b) for a, b in itertools.pairwise(ranks))
    share = attention.times((size - 1) / size)
    forward, backward = (
        _not_hidden(sends.times(times), share.times(part)) for times, part in ((1.0, 0.26), (2.0, 0.74))
    )
    return Exposed("context parallel", forward, total([backward, slowed_by(sends.times(3.0))]))


def way_of_context(run: PretrainConfig) -> str:
    """Returns how context parallel ranks exchange keys and values; of several ways that of the first layer."""
    return comm_type_of(run.transformer, 1).value


def _not_hidden(communication: Figure, computation: Figure) -> Figure:
    return Figure(max(0.0, communication.value - computation.value), communication.source, communication.error)


def _expert_parallel(run: PretrainConfig, stage: StageModules, cluster: Cluster, ranks: Sequence[int]) -> Exposed:
    """Tokens go to the ranks of their experts and come back, in forward and in backward."""
    config = run.transformer
    numbers = [number for number in stage.layers if layer_parts(config, number).channel_mixer == "moe"]
    layers = len(numbers) + stage.prediction_layers
    once = _one_way(run, cluster, ranks)
    forward = once.times(2.0 * layers)
    if config.delay_wgrad_compute:  # one of two ways of backward runs behind weight gradients
        return Exposed("expert parallel", forward, total([forward.times(0.5), slowed_by(forward.times(0.5))]))
    return Exposed("expert parallel", forward, forward)


def _one_way(run: PretrainConfig, cluster: Cluster, ranks: Sequence[int]) -> Figure:
    """Returns the time in which the tokens of one layer go to the ranks of their experts."""
    sent, size = bytes_one_way(run, len(ranks)), len(ranks)
    if run.transformer.moe_token_dispatcher_type == "allgather":
        return cluster.gather_seconds(sent * size / (size - 1), ranks)
    return cluster.exchange_seconds(sent, ranks)


def bytes_one_way(run: PretrainConfig, size: int) -> float:
    """Returns the bytes that a rank of an expert parallel group sends for a layer and micro-batch: its tokens to the
    ranks of their experts, if routing is even. They come back as many."""
    config, sizes = run.transformer, Sizes(run)
    row = (config.moe_latent_size or config.hidden_size) * sizes.dtype.itemsize
    chosen, experts = config.moe_router_topk, config.num_moe_experts or 1
    if config.moe_token_dispatcher_type == "allgather":
        times = float(size - 1)
    elif config.moe_token_dispatcher_type == "flex":  # a token goes to a rank once
        times = (1 - math.comb(experts - experts // size, chosen) / math.comb(experts, chosen)) * (size - 1)
    else:
        times = chosen * (size - 1) / size
    return sizes.own_tokens * row * times


def bytes_of_keys(run: PretrainConfig) -> float:
    """Returns the bytes of the keys and values of a layer, for the tokens of a micro-batch on a context parallel
    rank."""
    config, sizes = run.transformer, Sizes(run)
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        width = config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim)
    else:
        width = 2 * (config.num_query_groups or config.num_attention_heads) * (config.kv_channels or 0)
    return sizes.tokens * width / sizes.tensor * sizes.dtype.itemsize
