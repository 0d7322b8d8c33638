"""Counts on the meta device against real tensors on a CPU, to the byte: each kind of model, and each of our kernels."""

import contextlib
import dataclasses
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.command_lines import configured
from support.processes import run_on_ranks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatron.core.communication import collectives
from megatron.core.communication.collectives import HostCopy, PlannedGroup
from megatron.core.utils.torch_private import tree_leaves
from megatron.diagnosis.memory.allocations import Allocations
from megatron.diagnosis.memory.as_on_gpu import CountsOnHost, as_on_gpu
from megatron.diagnosis.memory.micro_batches import ShapeOnlyData
from megatron.diagnosis.memory.peak import providers_of_family
from megatron.diagnosis.memory.rank_memory import build_chunks
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.environment import groups_of_rank
from megatron.training.providers import Stage

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local"
)
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"
MLA = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16 --linear-conv-kernel-dim 4"
)
KINDS = {
    "gpt": "",
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "bf16": f"{LLAMA} --bf16",
    "experts": f"{LLAMA} {EXPERTS}",
    "latent attention": f"{LLAMA} {MLA}",
    "multi-token prediction": f"{LLAMA} --mtp-num-layers 1",
    "delta net": f"{LLAMA} {DELTA}",
    "loss in chunks": "--loss-chunk-size 16",
    "full recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute of norms": "--recompute-granularity selective --recompute-modules layernorm",
    "recompute of activations": f"{LLAMA} --recompute-granularity selective --recompute-modules layernorm mlp_act",
    "recompute of attention": "--recompute-granularity selective --recompute-modules core_attn",
}


FAMILIES = {
    "bert": ("bert", "--bert-no-binary-head"),
    "t5": ("t5", "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 32 --decoder-seq-length 16"),
    "hybrid": (
        "mamba",
        f"{LLAMA} --hybrid-layer-pattern M* --mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups 2",
    ),
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """Bytes of a forward and a backward."""

    saved: int
    """Storages that autograd saved in forward, without parameters."""
    kept: int
    forward_peak: int
    backward_peak: int


class RealData(ShapeOnlyData):
    """Yields micro-batches of these shapes with values, on a CPU."""

    def __next__(self) -> Any:
        batch = super().__next__()
        made = {
            field.name: torch.ones(value.shape, dtype=value.dtype)
            for field in dataclasses.fields(batch)
            if isinstance(value := getattr(batch, field.name), Tensor) and field.name != "sample_ids"
        }
        return dataclasses.replace(batch, **made)


def counted(config: PretrainConfig, device: str, rank: int = 0, counts: CountsOnHost | None = None) -> Counted:
    """Counts a micro-batch of a rank's model with parameters on a device. On a CPU, several ranks communicate."""
    providers = providers_of_family(config)
    tokenizer: Any = type("Ids", (), {"vocab_size": 101})()
    built = build_chunks(config, providers, tokenizer, 128, rank)
    environment = dataclasses.replace(built.context.environment, device=torch.device(device))
    if device == "cpu":
        environment = dataclasses.replace(environment, groups=groups_of_rank(config, rank))
    context = dataclasses.replace(built.context, environment=environment)
    model = built.chunks[0] if device == "meta" else providers.build_model(context, Stage())
    allocations = Allocations(1, device)
    allocations.leave_out([*model.parameters(), *model.buffers()])
    data = (ShapeOnlyData if device == "meta" else RealData)(config)
    saved: dict[int, tuple[Any, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not any(storage is one.untyped_storage() for one in model.parameters()):
            saved[id(storage)] = storage, storage.nbytes()
        return tensor

    step = providers.build_forward_step(context)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with contextlib.ExitStack() as stack:
        if device == "meta":
            stack.enter_context(as_on_gpu(counts or (lambda tensor: torch.full(tensor.shape, 32)), device="cpu"))
        stack.enter_context(allocations)
        step(data, model)  # fills caches
        first = allocations.live
        allocations.start()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            losses, loss_func = step(data, model)
            loss = loss_func(losses)[0]
        del losses, loss_func
        forward_peak, kept = allocations.peak - first, allocations.live - first
        total = sum(size for _, size in saved.values())
        saved.clear()
        allocations.start()
        torch.autograd.backward(loss)
    return Counted(total, kept, forward_peak, allocations.peak - first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_counted_to_the_byte(kind: str) -> None:
    config = configured(KINDS[kind], base=BASE)
    assert counted(config, "meta") == counted(config, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted_to_the_byte(family: str) -> None:
    name, flags = FAMILIES[family]
    words = f"{BASE} {flags}".split()
    if family == "t5":
        for word in ("--num-layers", "--seq-length"):
            del words[words.index(word) : words.index(word) + 2]
    defaults = getattr(importlib.import_module(f"pretrain_{name}"), "DEFAULTS", {"model_family": name})
    config = configure(words, args_defaults=defaults, launch_environment=LaunchEnvironment(1, has_cuda=False))
    assert counted(config, "meta") == counted(config, "cpu")


LAYOUTS = {
    "tensor": f"{LLAMA} --tensor-model-parallel-size 2",
    "sequence": f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel",
    "sequence, gpt": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context": f"{LLAMA} --context-parallel-size 2",
    "context, regrouped documents": (
        f"{LLAMA} --context-parallel-size 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16 "
        "--reset-attention-mask --calculate-per-token-loss"
    ),
    "context, Ulysses": f"{LLAMA} --context-parallel-size 2 --cp-comm-type a2a",
    "experts": f"{LLAMA} {EXPERTS} --expert-model-parallel-size 2 --moe-router-force-load-balancing",
    "latent attention": f"{LLAMA} {MLA} --tensor-model-parallel-size 2 --sequence-parallel",
}


class Done:
    """Stands for a communication that has ended."""

    def wait(self) -> None: ...


def communicate_copies(live: Any, collective: Any, *arguments: Any, **more: Any) -> Done | None:
    """Communicates copies that are not counted: gloo's threads hold tensors a little longer than the program does."""
    if isinstance(live, PlannedGroup):
        return None
    with _disable_current_modes(), torch.no_grad():
        copies = tree_map_only(Tensor, torch.clone, arguments)
        collective(*copies, group=live, **more)
        for tensor, copy in zip(tree_leaves(arguments), tree_leaves(copies), strict=True):
            if isinstance(tensor, Tensor):
                tensor.copy_(copy)
    return Done()


def counted_on_ranks() -> dict[str, tuple[Counted, Counted]]:
    """What this rank counts without and with real tensors, for each layout, with the same rows for each expert."""
    rank, found, rows, copied = dist.get_rank(), {}, list[Tensor](), HostCopy.__init__

    def noted(own: HostCopy, tensor: Tensor) -> None:
        with _disable_current_modes():  # as on a GPU, whose host has another memory
            own._copy, own._event = tensor.clone(), None
        rows.append(own._copy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_start", communicate_copies)
        for name, flags in LAYOUTS.items():
            config = configured(flags, base=BASE, ranks=2)
            patch.setattr(HostCopy, "__init__", noted)
            real = counted(config, "cpu", rank)
            patch.setattr(HostCopy, "__init__", copied)
            found[name] = counted(config, "meta", rank, lambda tensor: rows.pop(0)), real
    return found


def test_layouts_of_two_ranks_are_counted_to_the_byte() -> None:
    for rank, found in enumerate(run_on_ranks(counted_on_ranks, 2)):
        differing = {name: counts for name, counts in found.items() if counts[0] != counts[1]}
        assert not differing, rank
