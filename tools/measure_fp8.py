"""Measures how far bfloat16 and fp8 are from float32: python tools/measure_fp8.py --cell LLAMA1B

Takes a model of the speed table (tools/bench_cells.py), or the one that flags of pretrain_gpt.py describe, with the
same initial weights in bfloat16, in bfloat16 with fp8, and in float32. Prints, for each parameter's gradient of one
micro-batch, the smallest cosine to float32's and the largest difference of norms. Tokens go to the experts that float32
chooses.

With `--curve N` it also trains the model's first two layers for N steps on the bytes of `--text` and prints how the
losses differ. The learning rate rises during the first fifth of the steps.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.router_replay import router_replays
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.launch.errors import exit_with_problems
from tools.bench_cells import CELLS, COMMON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CURVE_LAYERS = ["--num-layers", "2"]
PEAK_LR, WARMUP = 3e-4, 0.2
"""The learning rate of curves, and the share of their steps in which it rises."""
Routing = list[list[Tensor]]
"""The experts of each router's forwards."""


def build(flags: Sequence[str], vocabulary: int) -> DistributedDataParallel:
    """Returns the model that the flags describe, wrapped, with weights that bfloat16 can represent."""
    try:
        config = configure([*COMMON.split(), "--vocab-size", str(vocabulary), *flags, "--train-iters", "1"])
    except ConfigurationError as error:
        exit_with_problems(error)
    length = config.data.seq_length
    assert length is not None
    transformer = config.transformer
    model = GPTModel(
        transformer,
        get_gpt_decoder_block_spec(transformer, use_transformer_engine=False),
        vocabulary,
        length,
        position_embedding_type=config.model.position_embedding_type,
        rotary_base=config.model.rotary_base,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
    ).to(DEVICE)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(parameter.data.bfloat16())
    return DistributedDataParallel(transformer, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def backward(model: DistributedDataParallel, ids: Tensor) -> float:
    """Adds the gradients of the mean loss of [b, s + 1] token ids to the main gradients; returns the loss."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None].expand(ids.shape[0], -1)
    loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).float().mean()
    loss.backward()
    return float(loss.detach())


def gradients(
    flags: Sequence[str], vocabulary: int, ids: Tensor, warm: int, routing: Routing | None = None
) -> tuple[dict[str, Tensor], float, Routing]:
    """Returns every parameter's gradient on the host, the loss, and the experts that the tokens went to: those of
    `routing`, or the routers' choice. Delayed scaling has seen the batch `warm` times."""
    experts = any(flag.startswith("--num-experts") for flag in flags)
    model, loss = build([*flags, *["--moe-enable-routing-replay"] * experts], vocabulary), 0.0
    replays = router_replays(model)
    for _ in range(warm + 1):
        model.zero_grad_buffer()
        for number, replay in enumerate(replays):
            if routing is None:
                replay.record()
            else:
                replay.replay(routing[number])
        loss = backward(model, ids)
        finalize_model_grads([model])
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {name: p.main_grad.float().cpu() for name, p in named.items()}  # type: ignore[attr-defined]
    return found, loss, [replay.recorded for replay in replays]


def compare(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> str:
    """Returns a line with the smallest cosine and the largest difference of norms."""
    cosines, norms = {}, {}
    for name, gradient in exact.items():
        one, other = (tensor.to(DEVICE).flatten().double() for tensor in (ours[name], gradient))
        cosines[name] = float(nn.functional.cosine_similarity(one, other, dim=0))
        norms[name] = float(one.norm() / other.norm()) - 1.0
    worst, longest = min(cosines, key=lambda name: cosines[name]), max(norms, key=lambda name: abs(norms[name]))
    return f"cosine at least {cosines[worst]:.5f} ({worst}), norms within {norms[longest]:+.2%} ({longest})"


def curve(flags: Sequence[str], vocabulary: int, text: Tensor, length: int, steps: int) -> list[float]:
    """The losses of some steps on pieces of a text, two a step."""
    model = build([*flags, *CURVE_LAYERS], vocabulary)
    bf16 = "--bf16" in flags
    config = OptimizerConfig(lr=PEAK_LR, bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32)
    optimizer = get_megatron_optimizer(config, [model])
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / (WARMUP * steps))
        model.zero_grad_buffer()
        starts = [(2 * step + row) * length % (text.numel() - length - 1) for row in range(2)]
        losses.append(backward(model, torch.stack([text[start : start + length + 1] for start in starts])))
        finalize_model_grads([model])
        optimizer.step_on_device()
    return losses


def main(words: Sequence[str] | None = None) -> None:
    """Trains with each recipe and prints how the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=CELLS, help="a model of the speed table")
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "delayed", "rowwise", "blockwise"])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the micro-batch's one row")
    parser.add_argument("--curve", type=int, default=0, metavar="N", help="compare the losses of N steps too")
    parser.add_argument("--text", type=Path, help="file or folder whose bytes are the tokens of the curve")
    args, flags = parser.parse_known_args(words)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = [*(CELLS[args.cell].split() if args.cell else []), *flags]
    ids = torch.rand(1, args.tokens + 1, generator=torch.Generator().manual_seed(1))
    ids = ((args.vocabulary**ids) - 1).long().to(DEVICE)  # as frequent as Zipf's law says
    kinds = {"bf16": ["--bf16"]} | {
        f"fp8 {recipe}": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe] for recipe in args.recipes
    }
    exact, loss, routing = gradients(model, args.vocabulary, ids, 0)
    print(f"float32: loss {loss:.5f}")
    for name, more in kinds.items():
        ours, loss, _ = gradients([*model, *more], args.vocabulary, ids, int("delayed" in name), routing)
        print(f"{name}: loss {loss:.5f}, {compare(ours, exact)}", flush=True)
    if args.curve:
        files = sorted(args.text.rglob("*.py")) if args.text.is_dir() else [args.text]
        data = b"".join(file.read_bytes() for file in files)
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().to(DEVICE)
        length = min(1024, args.tokens)
        reference = curve(model, args.vocabulary, text, length, args.curve)
        print(f"float32: losses {reference[0]:.4f} to {reference[-1]:.4f}, perplexity {math.exp(reference[-1]):.2f}")
        for name, more in kinds.items():
            found = curve([*model, *more], args.vocabulary, text, length, args.curve)
            apart = max(abs(one - other) for one, other in zip(found, reference, strict=True))
            tail = sum(found[-10:]) / len(found[-10:]) - sum(reference[-10:]) / len(reference[-10:])
            print(f"{name}: last loss {found[-1]:.4f}, at most {apart:.4f} apart, mean of the last ten {tail:+.4f}")


if __name__ == "__main__":
    run_main(main)
