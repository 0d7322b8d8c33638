"""Accelerate's Megatron plugin trains a transformers model with our parts: its own classes, its usual training loop."""

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

import megatron  # noqa: F401  # tells Accelerate a version of megatron-core

STEPS, ROWS, LENGTH, VOCABULARY, MICRO_BATCHES = 3, 4, 16, 60, 2


class OnCpu:
    """The plugin asks torch for CUDA; this stands for its module `torch`, with the CPU in its place."""

    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: torch.device("cpu"), FloatTensor=torch.FloatTensor
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def rows() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (STEPS * ROWS * MICRO_BATCHES, LENGTH), generator=made)
    return [{"input_ids": row, "labels": row} for row in ids]


def transformers_model(kind: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1, bos_token_id=0, **sizes))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    sizes["max_position_embeddings"] = LENGTH
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1, bos_token_id=0, **sizes))


def train(kind: str, parallel: dict[str, Any], folder: str) -> dict[str, list[float]]:
    """Trains as Accelerate's examples do, evaluates, saves, and goes on from the checkpoint after a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
    sys.argv = ["train.py", "config.yaml", "--output_dir", folder]  # the script's own words
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, MegatronLMDummyScheduler, MegatronLMPlugin, megatron_lm

    megatron_lm.torch = OnCpu()
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # the plugin serves no other
    others = {"fp64": True, "eos_token_id": VOCABULARY - 1, "make_vocab_size_divisible_by": 8}
    # A step has the same micro-batches in each layout, since the plugin averages the means of micro-batches.
    replicas = world // (parallel["tp_degree"] * parallel["pp_degree"])
    plugin = MegatronLMPlugin(
        num_micro_batches=MICRO_BATCHES // replicas, other_megatron_args=others, eval_iters=1, **parallel
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    model = transformers_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS, shuffle=False)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=10 * replicas, warmup_num_steps=0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        model.train()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if len(losses) == 2:
            accelerator.save_state(folder)
    model.eval()
    with torch.no_grad():
        losses.append(float(model(**batch).loss))
    model.train()
    accelerator.load_state(folder)
    again = float(model(**batch).loss)
    return {"losses": losses, "again": [again], "skipped": [float(optimizer.step_was_skipped)]}


LAYOUTS = {
    "dp2": (2, {"tp_degree": 1, "pp_degree": 1, "context_parallel_size": 1}),
    "tp2": (2, {"tp_degree": 2, "pp_degree": 1, "context_parallel_size": 1, "sequence_parallelism": True}),
    "tp2+pp2": (4, {"tp_degree": 2, "pp_degree": 2, "context_parallel_size": 1, "use_distributed_optimizer": True}),
}


def by_layout(kind: str, layout: str, folder: Path) -> list[float]:
    world, parallel = LAYOUTS[layout]
    found = run_on_ranks(train, world, kind, parallel, str(folder))
    last = found[-1]  # of the last stage, which has the losses
    assert last["skipped"] == [0.0]
    assert last["again"][0] == pytest.approx(last["losses"][2], rel=1e-12)  # step 3 from the checkpoint of step 2
    assert last["losses"][0] > last["losses"][3]
    return last["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_layouts_train_alike(kind: str, tmp_path: Path) -> None:
    reference = by_layout(kind, "dp2", tmp_path / "dp2")
    for layout in ("tp2", "tp2+pp2"):
        losses = by_layout(kind, layout, tmp_path / layout)
        assert losses == pytest.approx(reference, rel=1e-6)  # the plugin computes losses in float32


def test_the_version_that_accelerate_asks_for() -> None:
    from accelerate.utils import is_megatron_lm_available

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
        assert is_megatron_lm_available()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("megatron-bridge")
    assert "megatron-core" not in {found.name for found in importlib.metadata.distributions()}
