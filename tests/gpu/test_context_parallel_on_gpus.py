"""Context parallel attention on GPUs: fused blocks against float64 on one, exchanges over nccl on two or four.

The reference has seen what bfloat16 left of the inputs: errors are those of computing in it.
"""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpus import need_room
from torch import Tensor

from megatron.core.communication.collectives import Pending
from megatron.core.context_parallel import cut_rows, sequence_part
from megatron.core.context_parallel.kv_exchange import ring_steps
from megatron.core.context_parallel.ring import RingCall, ring_attention
from megatron.core.context_parallel.splitting import in_natural_order
from megatron.core.context_parallel.tiles import QueryKeyTile
from megatron.core.groups.defaults import default_collection
from megatron.core.ops.attention.blocks import BlockCall, merge_block
from megatron.core.ops.attention.blocks_cuda import cudnn_takes
from megatron.core.ops.attention.kernels import FLASH_BLOCKS, FUSED_BLOCKS, UNFUSED_BLOCKS, BlockKernel
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.precision import at_least_float32
from megatron.core.tokens import SequencePart, Tokens
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.rendezvous import local_device
from megatron.facades import parallel_state

ROOT = Path(__file__).parents[2]
ROW, RANKS = 1024, 4
EDGES = [0, 1, 130, 130, 700, 1023, ROW]

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": (100, 0)},
    "long window": {"window": (500, 0)},
    "window both ways": {"window": (300, 200), "causal": False},
    "packed": {"edges": EDGES},
    "packed, window": {"edges": EDGES, "window": (200, 0)},
    "sink": {"sink": True},
    "one group": {"groups": 1},
    "narrow heads": {"width": 36},
    "narrow values": {"width": 192, "value_width": 128, "groups": 4},
    "narrow values, packed, window": {"width": 24, "value_width": 16, "edges": EDGES, "window": (200, 0)},
}


def problem(feature: dict[str, Any], dtype: torch.dtype, device: str = "cuda") -> tuple[list[Tensor], Tensor]:
    """Query, key, value, sink; the gradient of the output."""
    b, a, g = 1 if "edges" in feature else 2, 4, feature.get("groups", 2)
    width = feature.get("width", 64)
    values = feature.get("value_width", width)
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROW, b, a, width), (ROW, b, g, width), (ROW, b, g, values), (a,), (ROW, b, a, values)]
    *inputs, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in inputs], gradient


def variant_of(feature: dict[str, Any]) -> AttentionVariant:
    scale = 1 / math.sqrt(feature.get("width", 64))
    return AttentionVariant(
        scale, feature.get("causal", True), feature.get("window"), feature.get("dropout", 0.0), "sink" in feature
    )


def edges_of(feature: dict[str, Any]) -> Tensor | None:
    return torch.tensor(feature["edges"], dtype=torch.int32, device="cuda") if "edges" in feature else None


def reference(feature: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of whole rows in float64, from inputs as `dtype` has them."""
    inputs, gradient = problem(feature, dtype)
    inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    call = AttentionCall(cu_seqlens=edges_of(feature), max_seqlen=ROW, sink=inputs[3] if "sink" in feature else None)
    output = attention(*inputs[:3], variant_of(feature), call)
    used = inputs if "sink" in feature else inputs[:3]
    return [output.detach(), *torch.autograd.grad(output, used, gradient.double())]


TOLERANCE = {torch.bfloat16: 3e-2, torch.float64: 1e-12}


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest over tensors, relative to the largest element; NaN where there is one."""
    pairs = zip(found, expected, strict=True)
    return torch.stack([(ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in pairs]).max().item()


# ---------------------------------------------------------------------------------------------------------------------
# One GPU plays all ranks


class Nearby:
    """The exchange of one rank of a ring where all ranks' keys are at hand."""

    def __init__(self, rank: int, whole: Tensor, totals: list[Tensor], join: bool, reach: tuple) -> None:
        self.rank, self.whole, self.totals = rank, whole, totals
        self.ring_steps = ring_steps(SequencePart(rank, RANKS), ROW // RANKS // 2, reach, join)

    @property
    def steps(self) -> tuple[tuple[QueryKeyTile, ...], ...]:
        return tuple(ring_step.tiles for ring_step in self.ring_steps)

    def _source(self, step: int) -> int:
        return (self.rank - self.ring_steps[step].distance) % RANKS

    def start_fetch(self, step: int, own: Tensor) -> Any:
        rows = cut_rows(self.whole, SequencePart(self._source(step), RANKS), 0)[self.ring_steps[step].fetched]
        return Pending(rows, None)

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> Any:
        return lambda: self.totals[self._source(step)][self.ring_steps[step].fetched].add_(gradient)


def on_one_gpu(feature: dict[str, Any], kernel: BlockKernel, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of all ranks, one rank after the other, put together."""
    (query, key, value, sink), gradient = problem(feature, dtype)
    whole = torch.cat([key.flatten(1), value.flatten(1)], 1).detach()
    width = whole.shape[1]
    wide = at_least_float32(dtype)
    totals = [torch.zeros(ROW // RANKS, width, device="cuda", dtype=wide) for _ in range(RANKS)]
    pieces: list[list[Tensor]] = [[], [], [], []]
    sink_gradient = torch.zeros_like(sink)
    for rank in range(RANKS):
        part = SequencePart(rank, RANKS)
        edges = edges_of(feature)
        exchange = Nearby(rank, whole, totals, edges is None, variant_of(feature).reach)
        job = RingCall(exchange, kernel, merge_block, variant_of(feature), BlockCall(edges, ROW))  # type: ignore[arg-type]
        mine = [cut_rows(tensor.detach(), part, 0).requires_grad_() for tensor in (query, key, value)]
        used = [*mine, sink] if "sink" in feature else mine
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = ring_attention(*mine, sink if "sink" in feature else None, job)
            found = torch.autograd.grad(output, used, cut_rows(gradient, part, 0))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for piece, tensor in zip(pieces, [output.detach(), *found], strict=False):
            piece.append(tensor)
        if "sink" in feature:
            sink_gradient += found[3]
    joined = [in_natural_order(torch.cat(piece), RANKS) for piece in pieces]
    others = in_natural_order(torch.cat(totals), RANKS)
    edge = key[0].numel()
    keys = others[:, :edge].unflatten(1, key.shape[1:]), others[:, edge:].unflatten(1, value.shape[1:])
    joined = [*joined[:2], joined[2] + keys[0], joined[3] + keys[1]]
    return [*joined, sink_gradient] if "sink" in feature else joined


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [FUSED_BLOCKS, FLASH_BLOCKS, UNFUSED_BLOCKS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", FEATURES)
def test_blocks_of_a_row(kernel: BlockKernel, name: str) -> None:
    feature, dtype = FEATURES[name], torch.float64 if kernel is UNFUSED_BLOCKS else torch.bfloat16
    on_one_gpu(feature, kernel, dtype)  # fills caches
    assert error(on_one_gpu(feature, kernel, dtype), reference(feature, dtype)) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_cudnn_is_used() -> None:
    assert cudnn_takes(4, 2, 64, 64, torch.bfloat16, torch.device("cuda"), False)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks over nccl


def split(feature: dict[str, Any], dtype: torch.dtype, cp_comm_type: str) -> list[Tensor]:
    """What this rank has of output and gradients, gathered to whole rows."""
    groups = default_collection()
    part = sequence_part(groups)
    assert part is not None
    (*inputs, sink), gradient = problem(feature, dtype)
    precision = {torch.bfloat16: {"bf16": True}, torch.float64: {"fp64": True}}[dtype]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4 * inputs[0].shape[3],
        num_attention_heads=4,
        num_query_groups=inputs[1].shape[2],
        attention_dropout=0.0,
        window_size=feature.get("window"),
        softmax_type="learnable" if "sink" in feature else "vanilla",
        cp_comm_type=cp_comm_type,
        **precision,
    )
    kind = AttnMaskType.causal if feature.get("causal", True) else AttnMaskType.no_mask
    layer = DotProductAttention(config, 1, kind, "self", pg_collection=groups).cuda()
    mine = [cut_rows(tensor.detach(), part, 0).requires_grad_() for tensor in inputs]
    if layer.softmax_offset is not None:
        layer.softmax_offset.data.copy_(sink.detach())
        mine.append(layer.softmax_offset)
    edges = edges_of(feature)
    tokens = Tokens(ROW // part.size, mine[0].shape[1], part, cu_seqlens=edges, max_seqlen=ROW)
    for attempt in range(2):  # the first starts communicators
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            output = layer(*mine[:3], inputs=LayerInputs(tokens))
            found = torch.autograd.grad(output, mine, cut_rows(gradient, part, 0).flatten(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    whole = []
    for tensor in [output.detach().unflatten(2, (4, -1)), *found[:3]]:
        gathered = tensor.new_empty(ROW, *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=groups.cp)
        whole.append(in_natural_order(gathered, part.size))
    if len(found) == 4:
        dist.all_reduce(found[3], group=groups.cp)
        whole.append(found[3])
    return whole


def main(answers: Path) -> None:
    torch.cuda.set_device(local_device())
    world = int(os.environ["WORLD_SIZE"])
    levels = {"hierarchical_context_parallel_sizes": [2, 2]} if world == 4 else {}
    parallel_state.initialize_model_parallel(context_parallel_size=world, **levels)
    errors = {}
    for way in ["p2p", "a2a", *(["a2a+p2p"] if world == 4 else [])]:
        for name, feature in FEATURES.items():
            for dtype in (torch.bfloat16, torch.float64):
                errors[way, name, dtype] = error(split(feature, dtype, way), reference(feature, dtype))
    (answers / f"{dist.get_rank()}").write_bytes(pickle.dumps(errors))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_over_nccl(ranks: int, tmp_path: Path) -> None:
    need_room(ranks)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([*launcher, __file__, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(ranks):
        errors = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert not {case: found for case, found in errors.items() if not found < TOLERANCE[case[2]]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
