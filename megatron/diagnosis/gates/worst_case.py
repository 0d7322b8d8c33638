"""Runs a training script with the inputs that take most memory, and writes the peak of each rank:

python -m megatron.diagnosis.gates.worst_case FOLDER even|uneven SCRIPT FLAGS

Every sample is a single document of the whole sequence length, without masked tokens. With `uneven`, every router sends
all tokens to the first experts, which one expert parallel rank holds. The memory gate (memory.py) starts this file.
"""

import dataclasses
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.training import loop
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.hook import Hook, Hooks
from megatron.training.launch.environment import Environment
from megatron.training.log.memory import memory_report
from megatron.training.providers import Providers
from megatron.training.trainer import Trainer


class FirstExperts(RouterReplay):
    """Sends every token to the first k experts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def given(self, tokens: int, topk: int) -> Tensor:
        """Returns the experts 0 to k - 1 for each token: [tokens, k]."""
        return torch.arange(topk, device=self.device).expand(tokens, topk).contiguous()


def route_to_first_experts(chunks: Sequence[nn.Module], device: torch.device) -> int:
    """Makes all routers of some model chunks send every token to the first experts. Returns their number."""
    found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    routers = [router for router in found if not router.uses_sinkhorn]  # Sinkhorn's routing is even by construction
    for router in routers:
        router.replay = FirstExperts(device)
    return len(routers)


def longest_rows(item: dict[str, Any]) -> dict[str, Any]:
    """Returns a sample as a single document whose tokens all count in the loss. Samples of other kinds stay as they
    are."""
    item = dict(item)
    length = len(item["tokens"]) if "tokens" in item else 0
    if length and "cu_seqlens" in item:
        bounds = torch.full_like(item["cu_seqlens"], length)
        bounds[0] = 0
        item |= {"cu_seqlens": bounds, "max_seqlen": torch.full_like(item["max_seqlen"], length)}
    if length and "loss_mask" in item:
        item["loss_mask"] = torch.ones_like(item["loss_mask"])
    return item


def with_longest_rows(dataset: Any) -> Any:
    """Makes a dataset return `longest_rows`."""
    if dataset is None:
        return None
    kind = type(dataset)

    def item_of(self: Any, idx: Any) -> dict[str, Any]:
        return longest_rows(kind.__getitem__(self, idx))

    # The class of this one object changes: a wrapper would hide the attributes that the run reads from its datasets.
    dataset.__class__ = type(kind.__name__, (kind,), {"__getitem__": item_of})
    return dataset


class PeakMemory(Hook):
    """Writes this rank's peak memory to a file after each step."""

    def __init__(self, folder: Path, device: torch.device, routers: int) -> None:
        self.folder, self.device, self.routers = folder, device, routers

    def after_step(self, iteration: int) -> None:
        """Writes the peak so far."""
        write_peak(self.folder, self.device, iteration, self.routers)


def write_peak(folder: Path, device: torch.device, steps: int, routers: int = 0) -> None:
    """Writes the peak memory of this process: bytes on the device, or resident bytes on a CPU."""
    report = memory_report(device)
    on_gpu = device.type == "cuda"
    content = {
        "rank": int(os.environ.get("RANK", "0")),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "peak": report.device_peak_reserved if on_gpu else report.host_peak,
        "peak_allocated": report.device_peak_allocated if on_gpu else None,
        "total": _total(device),
        "outside_torch": _outside(device, report.device_reserved) if on_gpu else 0,
        "steps": steps,
        "routers": routers,
        "time": time.time(),
    }
    (folder / f"peak_{content['rank']:05d}.json").write_text(json.dumps(content))


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _outside(device: torch.device, reserved: int | None) -> int:
    """Returns the device memory that torch's allocator does not hold: contexts, NCCL, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - (reserved or 0))


def main(folder: Path, uneven: bool) -> None:
    """Runs the script that sys.argv names, under the worst case."""
    found: list[torch.device] = []
    original = loop.set_up

    def set_up(config: PretrainConfig, providers: Providers, environment: Environment, *rest: Any) -> Trainer:
        found.append(environment.device)
        build = providers.build_datasets

        def longest(*words: Any) -> list[Any]:
            return [with_longest_rows(one) for one in build(*words)]

        trainer = original(config, dataclasses.replace(providers, build_datasets=longest), environment, *rest)
        routers = route_to_first_experts(list(trainer.model), environment.device) if uneven else 0
        trainer.hooks = Hooks([*trainer.hooks.hooks, PeakMemory(folder, environment.device, routers)])
        return trainer

    # The script builds its run itself, so this is the one place where all parts of the run are at hand.
    loop.set_up = set_up  # type: ignore[assignment]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        rank = os.environ.get("RANK", "0")
        if found and not (folder / f"peak_{int(rank):05d}.json").exists():  # it failed before the end of a step
            write_peak(folder, found[0], 0)


if __name__ == "__main__":
    where, routing = Path(sys.argv[1]), sys.argv[2]
    del sys.argv[:3]
    main(where, routing == "uneven")
