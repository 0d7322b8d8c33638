"""A training loop over megatron.core alone:   torchrun --nproc_per_node=2 examples/run_simple_mcore_train_loop.py

A small GPT on two tensor parallel ranks, with made-up data, a sharded optimizer, and a checkpoint that is saved to
runs/simple_mcore_checkpoint, loaded into another model and compared. Runs on GPUs if there are any, otherwise on the
CPU. It also runs as plain `python`, and with 4, 6, ... processes: each pair of processes then takes its own part of the
data.
"""

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.rendezvous import local_device, start_torch_distributed

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, MICRO_BATCHES, ITERATIONS = 64, 4, 2, 20
VOCABULARY = 128


def build_model(seed: int = 1234) -> GPTModel:
    """Returns a small GPT, tensor parallel if there are two processes."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seed=seed,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE_LENGTH)


def build_data() -> Iterator[dict[str, Tensor]]:
    """Yields micro-batches without end. Ranks of a tensor parallel group get the same ones; data parallel ranks get
    different ones."""
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        tokenizer=SimpleNamespace(vocab_size=VOCABULARY, eod=VOCABULARY - 1),
        create_attention_mask=False,
        mock=True,
    )
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    samples = ITERATIONS * MICRO_BATCHES * MICRO_BATCH_SIZE * data_size
    train, *_ = BlendedMegatronDatasetBuilder(MockGPTDataset, [samples, None, None], lambda: True, config).build()
    sampler: DistributedSampler[Any] = DistributedSampler(train, data_size, data_rank, shuffle=False)
    loader = DataLoader(train, MICRO_BATCH_SIZE, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def forward_step(data: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Returns the losses of one micro-batch, and the function that averages them."""
    device = local_device()
    batch = {name: value.to(device) for name, value in next(data).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean loss of the tokens that count, and what is reported."""
    loss = (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    return loss, {"lm loss": loss.detach()}


def train() -> tuple[GPTModel, list[float]]:
    """Trains the model. Returns the model and the losses."""
    model = build_model().to(local_device())
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=2e-3, weight_decay=0.01), [wrapped])
    model.config.finalize_model_grads_func = finalize_model_grads
    forward_backward, data = get_forward_backward_func(), build_data()
    losses = []
    for iteration in range(ITERATIONS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=wrapped,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
        )
        _, grad_norm, _ = optimizer.step()
        losses.append(torch.stack([report["lm loss"] for report in reports]).mean().item())
        say(f"iteration {iteration + 1:3d}   loss {losses[-1]:.4f}   gradient norm {float(grad_norm):.3f}")
    return model, losses


def save_and_reload(model: GPTModel, folder: Path) -> None:
    """Saves the weights, loads them into another model and compares."""
    if is_first():
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run: a save writes over nothing
    if dist.is_initialized():
        dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(prefix=""), str(folder))
    other = build_model(seed=1).to(local_device())
    other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(prefix=""), str(folder)))
    loaded = other.state_dict()
    differing = [name for name, value in model.state_dict().items() if not torch.equal(value, loaded[name])]
    assert not differing, differing
    say(f"saved to {folder} and loaded into another model: every weight is equal to the bit")


def is_first() -> bool:
    """Whether this process is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Prints a line on rank 0."""
    if is_first():
        print(text, flush=True)


def main() -> None:
    """Trains, saves and loads in all processes."""
    ranks = dist.get_world_size() if start_torch_distributed(local_device()) else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2 if ranks % 2 == 0 else 1)
    say(f"{ranks} processes, {parallel_state.get_tensor_model_parallel_world_size()} of them tensor parallel")
    model, _ = train()
    save_and_reload(model, Path("runs/simple_mcore_checkpoint"))
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
