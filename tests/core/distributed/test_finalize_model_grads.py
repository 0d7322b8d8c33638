"""What descriptors ask of finalisation: partial gradients are summed over their axis, tied ones over both ends."""

import pytest
import torch
from support.pool import Pool
from support.sharding import STRATEGIES
from support.small_models import SmallModel
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.sharding_strategy import is_counted_on_this_rank, replica_ranks, shardings
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection, first_and_last
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.initializers import Constant
from megatron.core.optimizer.clip_grads import count_zeros, grad_norm
from megatron.core.parameters import Box, ParameterInfo, declare, main_grad_accumulator, name_parameters


class Declared(nn.Module):
    """A sharded matrix, a whole norm whose gradient each tp rank has a part of, and a tied table."""

    def __init__(self, tp_rank: int, tp_size: int, is_first: bool = False) -> None:
        super().__init__()
        # Of sizes that every one of two shards has something of.
        self.matrix = nn.Parameter(torch.zeros(24 // tp_size, 10))
        self.norm = nn.Parameter(torch.zeros(100))
        self.embedding = nn.ParameterDict({"table": torch.zeros(45, 2)})
        if is_first:  # beside the table there is more on the first stage only
            self.embedding["positions"] = torch.zeros(50, 4)
        box = Box((tp_rank * 24 // tp_size, 0), (24 // tp_size, 10))
        declare(self.matrix, Constant(0.0), global_shape=(24, 10), box=box, sharded_axes=frozenset({"tp"}))
        declare(self.norm, Constant(0.0), partial_gradient_axes=frozenset({"tp"}))
        declare(self.embedding["table"], Constant(0.0), tied=True)
        name_parameters(self)
        self.calculate_per_token_loss = False


Finalised = tuple[dict[str, set[float]], dict[str, int], float, float]


def finalised(ranks: int, sizes: dict[str, int], strategy: str = "no_shard", chunks: int = 1) -> Finalised:
    """Every gradient is 1 + rank (in a second chunk, ten times that) before; values of what this rank owns of them
    after, how many elements that is, and norm and zeros of a gradient of ones with one zero in the norm."""
    rank = torch.distributed.get_rank()
    last = (lambda pipeline: pipeline[:1]) if chunks > 1 else first_and_last
    groups = ProcessGroupCollection.from_grid(RankGrid(ranks, **sizes), rank, embedding_ranks=last)
    config = DistributedDataParallelConfig(**STRATEGIES[strategy])
    tp_rank, tp_size, first = groups.rank("tp"), groups.size("tp"), groups.size("pp") > 1 and groups.rank("pp") == 0
    models = [Declared(tp_rank, tp_size, first) for _ in range(chunks)]
    wrapped = [DistributedDataParallel(model, config, model, pg_collection=groups) for model in models]
    for chunk, model in enumerate(models):
        for parameter in model.parameters():
            value = (1.0 + rank) * 10.0**chunk
            main_grad_accumulator(parameter).add(torch.full(parameter.shape, value))  # type: ignore[union-attr]
    finalize_model_grads(wrapped, pg_collection=groups)
    seen: dict[str, set[float]] = {}
    owned: dict[str, int] = {}
    for chunk, ddp in enumerate(wrapped):
        for parameter_slice in ddp.gradient_chunks():
            name = parameter_slice.name.removeprefix("embedding.")
            name = name if chunk == 0 else f"{chunk}:{name}"
            seen.setdefault(name, set()).update(parameter_slice.tensor.tolist())
            owned[name] = owned.get(name, 0) + parameter_slice.tensor.numel()
            parameter_slice.tensor.fill_(1.0)
            if name == "norm" and parameter_slice.range[0] == 0:
                parameter_slice.tensor[0] = 0.0
    units = [unit for ddp in wrapped for unit in ddp.units]
    answer = seen, owned, grad_norm(units, groups).item(), count_zeros(units, groups).item()
    groups.close()
    return answer


def check(got: Finalised, **expected: float) -> None:
    assert got[0] == {name: {value} for name, value in expected.items()}


def test_partial_gradients_are_summed_over_their_axis(pool: Pool) -> None:
    for rank, got in enumerate(pool.run(finalised, 2, 2, {"tensor": 2})):
        check(got, matrix=1.0 + rank, norm=3.0, table=1.0 + rank)
        assert got[2] == pytest.approx((240 + 99 + 90) ** 0.5, rel=1e-7)
        assert got[3] == 1


def test_tied_gradients_are_summed_over_the_ends_of_the_pipeline(pool: Pool) -> None:
    for rank, got in enumerate(pool.run(finalised, 4, 4, {"pipeline": 4})):
        own = 1.0 + rank
        expected = {"matrix": own, "norm": own, "table": 5.0 if rank in (0, 3) else own}
        check(got, **expected, **({"positions": own} if rank == 0 else {}))
        # Each stage's own matrix and norm count; the tied table counts on the first stage alone.
        assert got[2] == pytest.approx((4 * (240 + 99) + 90 + 200) ** 0.5, rel=1e-7)
        assert got[3] == 4


def everything_is_owned(ranks: list[Finalised], copies: dict[str, int]) -> None:
    for name, count in copies.items():
        assert sum(owned.get(name, 0) for _, owned, _, _ in ranks) == count, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partial_gradients_of_shards(pool: Pool, strategy: str) -> None:
    ranks = pool.run(finalised, 4, 4, {"tensor": 2}, strategy)
    for rank, got in enumerate(ranks):
        mean = (1.0 + rank % 2 + 3.0 + rank % 2) / 2  # over ranks r and r + 2
        check(got, matrix=mean, norm=5.0, table=mean)
        assert got[2] == pytest.approx((240 + 99 + 90) ** 0.5, rel=1e-7)
        assert got[3] == 1
    times = 4 if strategy == "no_shard" else 2
    everything_is_owned(ranks, {"matrix": 120 * times, "norm": 100 * times, "table": 90 * times})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_gradients_of_shards(pool: Pool, strategy: str) -> None:
    ranks = pool.run(finalised, 4, 4, {"pipeline": 2}, strategy)
    for rank, got in enumerate(ranks):
        mean = 1.5 if rank < 2 else 3.5  # over the two ranks of a stage
        check(got, matrix=mean, norm=mean, table=5.0, **({"positions": mean} if rank < 2 else {}))
        assert got[2] == pytest.approx((2 * (240 + 99) + 90 + 200) ** 0.5, rel=1e-7)
        assert got[3] == 2
    times = 4 if strategy == "no_shard" else 2
    everything_is_owned(ranks, {"matrix": 240 * times, "norm": 100 * times, "table": 90 * times})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_gradients_of_two_chunks_of_one_rank(pool: Pool, strategy: str) -> None:
    for got in pool.run(finalised, 2, 2, {}, strategy, 2):
        sums = {"matrix": 1.5, "norm": 1.5, "table": 16.5}
        check(got, **sums, **{"1:matrix": 15.0, "1:norm": 15.0, "1:table": 16.5})
        # A canonical table counts once, even if several chunks have copies.
        assert got[2] == pytest.approx((2 * 240 + 2 * 100 - 1 + 90) ** 0.5, rel=1e-7)
        assert got[3] == 1


def tokens_counted(tokens: list[int]) -> Tensor:
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(len(tokens)), rank)
    model = SmallModel(per_token=True)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    for parameter in model.parameters():
        parameter.main_grad.fill_(6.0)
    finalize_model_grads([ddp], torch.tensor(tokens[rank]))
    groups.close()
    return model.embedding.table.main_grad[0, 0].clone()  # type: ignore[union-attr,index]


@pytest.mark.parametrize(("tokens", "expected"), [([5, 0], 12 / 5), ([3, 1], 3.0), ([0, 0], 12.0)])
def test_gradients_are_divided_by_the_tokens_of_the_global_batch(
    pool: Pool, tokens: list[int], expected: float
) -> None:
    assert [value.item() for value in pool.run(tokens_counted, 2, tokens)] == pytest.approx([expected] * 2)


def info(**facts: object) -> ParameterInfo:
    return ParameterInfo((4, 4), Box.whole((4, 4)), Constant(0.0), **facts)  # type: ignore[arg-type]


def test_each_parameter_counts_on_one_rank_of_a_model_and_its_replicas_are_known() -> None:
    grid = RankGrid(16, tensor=2, pipeline=2, expert=4, expert_tensor=1)
    ranks = [ProcessGroupCollection.from_grid(grid, rank) for rank in range(16)]
    sharded, whole, tied = info(sharded_axes=frozenset({"tp"})), info(), info(tied=True)
    expert = info(grid="expert", sharded_axes=frozenset({"ep"}))
    model_parallel = ranks[0].ranks("mp")
    assert model_parallel == (0, 1, 8, 9)
    assert [is_counted_on_this_rank(sharded, ranks[r]) for r in model_parallel] == [True, True, True, True]
    assert [is_counted_on_this_rank(whole, ranks[r]) for r in model_parallel] == [True, False, True, False]
    assert [is_counted_on_this_rank(tied, ranks[r]) for r in model_parallel] == [True, False, False, False]
    assert all(is_counted_on_this_rank(expert, groups) for groups in ranks)
    assert replica_ranks(whole, ranks[3]) == tuple(range(8))
    assert replica_ranks(sharded, ranks[3]) == (1, 3, 5, 7)
    assert replica_ranks(expert, ranks[3]) == (3, 7)
    assert replica_ranks(tied, ranks[3]) == tuple(range(16))


def test_who_owns_the_same_range_is_known() -> None:
    grid = RankGrid(16, tensor=2, pipeline=2, optimizer_instances=2)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    groups = ProcessGroupCollection.from_grid(grid, 3)
    sharding = shardings(config, groups)["dense"]
    assert (sharding.shards, sharding.shard_index, sharding.instances) == (2, 1, 2)
    sharded, whole, tied = info(sharded_axes=frozenset({"tp"})), info(), info(tied=True)
    # Data parallel ranks of 3 are 1, 3, 5, 7: instances (1, 3) and (5, 7). Tensor parallel: 2. Other stage: 11.
    assert replica_ranks(sharded, groups, sharding) == (3, 7)
    assert replica_ranks(whole, groups, sharding) == (2, 3, 6, 7)
    assert replica_ranks(tied, groups, sharding) == (2, 3, 6, 7, 10, 11, 14, 15)
    one = ProcessGroupCollection.from_grid(RankGrid(16, tensor=2, pipeline=2), 3)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    assert replica_ranks(sharded, one, shardings(config, one)["dense"]) == (3,)
    assert replica_ranks(tied, one, shardings(config, one)["dense"]) == (2, 3, 10, 11)


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(UserError, match="SmallModel is not wrapped in DistributedDataParallel"):
        finalize_model_grads([SmallModel()])
