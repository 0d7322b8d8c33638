"""What descriptors ask of finalisation: partial gradients are summed over their axis, tied ones over both ends."""

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.replicas import counts_here, replica_ranks
from megatron.core.exceptions import UserError
from megatron.core.optimizer.clip_grads import count_zeros, grad_norm
from megatron.core.parameters import Box, Constant, ParameterInfo, declare, name_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid


class Declared(nn.Module):
    """A sharded matrix, a whole norm whose gradient each tp rank has a part of, and a tied table."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4 // tp_size, 3))
        self.norm = nn.Parameter(torch.zeros(5))
        self.table = nn.Parameter(torch.zeros(7, 2))
        box = Box((tp_rank * 4 // tp_size, 0), (4 // tp_size, 3))
        declare(self.matrix, Constant(0.0), global_shape=(4, 3), box=box, sharded_axes=frozenset({"tp"}))
        declare(self.norm, Constant(0.0), partial_gradient_axes=frozenset({"tp"}))
        declare(self.table, Constant(0.0), tied=True)
        name_parameters(self)
        self.calculate_per_token_loss = False


def finalised(sizes: dict[str, int]) -> tuple[dict[str, float], float, float]:
    """Every gradient is 1 + rank before; the gradients after, and norm and zeros of a gradient of ones."""
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(torch.distributed.get_world_size(), **sizes), rank)
    model = Declared(groups.rank("tp"), groups.size("tp"))
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), model, pg_collection=groups)
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0 + rank)
    finalize_model_grads([ddp], pg_collection=groups)
    seen = {}
    for name, parameter in model.named_parameters():
        (seen[name],) = set(parameter.main_grad.flatten().tolist())
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    model.norm.main_grad[0] = 0.0
    return seen, grad_norm(ddp.units, groups).item(), count_zeros(ddp.units, groups).item()


def test_partial_gradients_are_summed_over_their_axis() -> None:
    for rank, (seen, norm, zeros) in enumerate(run_on_ranks(finalised, 2, {"tensor": 2})):
        assert seen == {"matrix": 1.0 + rank, "norm": 3.0, "table": 1.0 + rank}
        assert norm == pytest.approx((12 + 4 + 14) ** 0.5, rel=1e-7)
        assert zeros == 1


def test_tied_gradients_are_summed_over_the_ends_of_the_pipeline() -> None:
    for rank, (seen, norm, zeros) in enumerate(run_on_ranks(finalised, 4, {"pipeline": 4})):
        tied = 5.0 if rank in (0, 3) else 1.0 + rank
        assert seen == {"matrix": 1.0 + rank, "norm": 1.0 + rank, "table": tied}
        # Each stage's own matrix and norm count; the tied table counts on the first stage alone.
        assert norm == pytest.approx((4 * (12 + 4) + 14) ** 0.5, rel=1e-7)
        assert zeros == 4


def test_both_with_data_parallel_ranks() -> None:
    for rank, (seen, norm, _) in enumerate(run_on_ranks(finalised, 4, {"tensor": 2})):
        mean = (1.0 + rank % 2 + 3.0 + rank % 2) / 2  # over ranks r and r + 2
        assert seen == {"matrix": mean, "norm": 5.0, "table": mean}
        assert norm == pytest.approx((12 + 4 + 14) ** 0.5, rel=1e-7)


def tokens_counted(tokens: list[int]) -> Tensor:
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(len(tokens)), rank)
    model = SmallModel(per_token=True)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    for parameter in model.parameters():
        parameter.main_grad.fill_(6.0)
    finalize_model_grads([ddp], torch.tensor(tokens[rank]))
    return model.embedding.table.main_grad[0, 0].clone()  # type: ignore[union-attr,index]


@pytest.mark.parametrize(("tokens", "expected"), [([5, 0], 12 / 5), ([3, 1], 3.0), ([0, 0], 12.0)])
def test_gradients_are_divided_by_the_tokens_of_the_global_batch(tokens: list[int], expected: float) -> None:
    assert [value.item() for value in run_on_ranks(tokens_counted, 2, tokens)] == pytest.approx([expected] * 2)


def info(**facts: object) -> ParameterInfo:
    return ParameterInfo((4, 4), Box.whole((4, 4)), Constant(0.0), **facts)  # type: ignore[arg-type]


def test_each_parameter_counts_on_one_rank_of_a_model_and_its_replicas_are_known() -> None:
    grid = RankGrid(16, tensor=2, pipeline=2, expert=4, expert_tensor=1)
    ranks = [ProcessGroupCollection.from_grid(grid, rank) for rank in range(16)]
    sharded, whole, tied = info(sharded_axes=frozenset({"tp"})), info(), info(tied=True)
    expert = info(grid="expert", sharded_axes=frozenset({"ep"}))
    model_parallel = ranks[0].ranks("mp")
    assert model_parallel == (0, 1, 8, 9)
    assert [counts_here(sharded, ranks[r]) for r in model_parallel] == [True, True, True, True]
    assert [counts_here(whole, ranks[r]) for r in model_parallel] == [True, False, True, False]
    assert [counts_here(tied, ranks[r]) for r in model_parallel] == [True, False, False, False]
    assert all(counts_here(expert, groups) for groups in ranks)
    assert replica_ranks(whole, ranks[3]) == tuple(range(8))
    assert replica_ranks(sharded, ranks[3]) == (1, 3, 5, 7)
    assert replica_ranks(expert, ranks[3]) == (3, 7)


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(UserError, match="SmallModel is not wrapped in DistributedDataParallel"):
        finalize_model_grads([SmallModel()])
