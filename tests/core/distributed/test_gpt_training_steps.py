"""Whole training steps of a GPT on 1, 2 and 4 data parallel ranks against a plain loop in one process, in float64.

The plain loop shares the model's forward and nothing else: a bare model with ordinary gradients, torch's own clipping
and AdamW, the learning rate set by hand.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import info_of
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, LENGTH, GLOBAL_BATCH, MICRO_BATCH, STEPS, SEED = 50, 12, 8, 2, 3, 11
MAX_LR, WARMUP = 0.02, 32


def build_model(tied: bool, dropout: float, groups: ProcessGroupCollection | None, **settings: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        fp64=True,
        seed=SEED,
        finalize_model_grads_func=finalize_model_grads,
        **settings,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=tied,
        pg_collection=groups,
        vocab_padding_multiple=8,
    )
    with torch.no_grad():  # norms and biases start random too
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(number)
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def rows(step: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and loss mask of some rows of a step's global batch. Masks are uneven; one row has none."""
    text = []
    for row in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + row)
        ids = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        text.append((ids[:-1], ids[1:], (torch.rand(LENGTH, generator=generator) < row % 4 / 3).double()))
    ids, labels, mask = (torch.stack(column) for column in zip(*text, strict=True))
    return ids, labels, mask


def micro_batch_losses(model: nn.Module, step: int, first: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses and number of tokens of the micro-batch that begins with row `first`."""
    ids, labels, mask = rows(step, first, MICRO_BATCH)
    tokens = Tokens(LENGTH, MICRO_BATCH, random=RngPosition(SEED, step, first))
    losses = model(ids, None, None, labels=labels, tokens=tokens)
    return (losses * mask).sum(), mask.sum()


def plain_loop(tied: bool, per_token: bool, dropout: float) -> list[dict[str, Any]]:
    model = build_model(tied, dropout, None)
    named = {info_of(p).name: p for p in model.parameters()}
    decayed = [p for p in named.values() if info_of(p).decays]
    rest = [p for p in named.values() if not info_of(p).decays]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8
    )
    seen = []
    for step in range(STEPS):
        parts = [micro_batch_losses(model, step, first) for first in range(0, GLOBAL_BATCH, MICRO_BATCH)]
        if per_token:
            loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        else:
            loss = sum(total / count for total, count in parts) / len(parts)
        loss.backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = MAX_LR * min(1.0, step * GLOBAL_BATCH / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in named.items()}
        seen.append({"losses": [float(t.detach()) for t, _ in parts], "norm": float(norm), "weights": weights})
    return seen


def our_loop(tied: bool, per_token: bool, dropout: float, overlap: bool) -> list[dict[str, Any]]:
    dist = torch.distributed
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
    model = build_model(tied, dropout, groups, calculate_per_token_loss=per_token)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=3000)
    ddp = DistributedDataParallel(model.config, ddp_config, model, pg_collection=groups)
    config = OptimizerConfig(lr=MAX_LR, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.5)
    optimizer = get_megatron_optimizer(config, [ddp])
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, MAX_LR, 0.0, WARMUP, 1000, "constant", 0.1, 0.1, 1000, "constant"
    )

    def forward_step(numbers: Iterator[int], chunk: nn.Module, step: int) -> tuple[Tensor, Any]:
        total, count = micro_batch_losses(chunk, step, (next(numbers) * world + rank) * MICRO_BATCH)
        return total, lambda output: (output, count, {"lm loss": torch.stack([output.detach(), count])})

    seen = []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        reports = get_forward_backward_func(pp_size=1)(
            forward_step_func=partial(forward_step, step=step),
            data_iterator=iter(range(GLOBAL_BATCH)),
            model=ddp,
            num_microbatches=GLOBAL_BATCH // (world * MICRO_BATCH),
        )
        update = optimizer.step_on_device(torch.tensor(True))
        scheduler.advance_on_device(update.update_applied, GLOBAL_BATCH)
        weights = {info_of(p).name: p.detach().clone() for p in ddp.parameters()}
        losses = [float(report["lm loss"][0]) for report in reports]
        seen.append({"losses": losses, "norm": float(update.grad_norm), "weights": weights})
    return seen


@pytest.mark.fast("True-False-0.2-True-4")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("tied", "per_token", "dropout", "overlap"), [(True, False, 0.2, True), (False, True, 0.0, False)]
)
def test_three_steps(tied: bool, per_token: bool, dropout: float, overlap: bool, world: int) -> None:
    expected = plain_loop(tied, per_token, dropout)
    ranks = run_on_ranks(our_loop, world, tied, per_token, dropout, overlap)
    for step in range(STEPS):
        losses = expected[step]["losses"]
        for rank, seen in enumerate(ranks):
            assert seen[step]["losses"] == pytest.approx(losses[rank::world], rel=1e-11)
            assert seen[step]["norm"] == pytest.approx(expected[step]["norm"], rel=1e-11)
            for name, weight in expected[step]["weights"].items():
                error = (seen[step]["weights"][name] - weight).norm() / weight.norm()
                assert error < 1e-11, (step, name, error)
                assert torch.equal(seen[step]["weights"][name], ranks[0][step]["weights"][name]), (rank, name)
