"""Measures how far bfloat16 and fp8 are from float32: python benchmarks/measure_fp8.py --cell LLAMA1B

Takes a model of the speed table (bench_cells.py), or the one that flags of pretrain_gpt.py describe, with the
same initial weights in bfloat16, in bfloat16 with fp8, and in float32. Prints, over the gradients of all parameters of
one micro-batch, the smallest cosine to float32's and the largest difference of norms. Tokens go to the experts that
float32 chooses.

One micro-batch is one draw: `--micro-batches N` takes N of them, with different tokens, and prints means. With
`--against-transformer-engine` the layers of Transformer Engine compute the same gradients of the same weights, tokens
and experts, and a line for each recipe says whether ours are no worse.

With `--curve N` it also trains the model's first two layers for N steps on the bytes of `--text` and prints how the
losses differ. The learning rate rises to `--peak-lr` during the first fifth of the steps. Single curves differ by
chance, most where losses jump because the rate is too high for the model, so `--curves M` takes M parts of the text and
prints means. `--keep FILE` keeps float32's losses for later calls.
"""

import gc
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
from torch import Tensor

from benchmarks.bench_cells import CELLS, COMMON
from benchmarks.measuring import parser_of
from megatron.core import backends
from megatron.core.declarations.flag_grammars import layer_pattern
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ops.transformer_engine.engine import why_layers_stay_ours
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.router_replay import router_replays
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.launch.errors import exit_with_problems

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARMUP = 0.2
"""The share of a curve's steps in which the learning rate rises."""
RECIPES: dict[str, tuple[str, ...]] = {
    recipe: ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe)
    for recipe in ("tensorwise", "delayed", "blockwise")
}
RECIPES["delayed"] += ("--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max")
WARM = 6
"""Passes over the first micro-batch before delayed scaling is measured: Transformer Engine's scales begin at 1."""
ENGINE = ("--transformer-impl", "transformer_engine")


@dataclass(frozen=True)
class Pass:
    """One micro-batch, forward and backward."""

    gradients: dict[str, Tensor]
    """float32, of each parameter. The next pass overwrites them."""
    loss: float
    experts: list[list[Tensor]]
    """What each router recorded."""


@dataclass(frozen=True)
class Errors:
    """How far the gradients of one micro-batch are from float32's."""

    loss: float
    cosines: dict[str, float]
    norms: dict[str, float]
    """The quotients of norms, minus 1."""

    @property
    def worst(self) -> str:
        """The parameter with the smallest cosine."""
        return min(self.cosines, key=lambda name: self.cosines[name])

    @property
    def longest(self) -> str:
        """The parameter with the largest difference of norms."""
        return max(self.norms, key=lambda name: abs(self.norms[name]))

    @property
    def distances(self) -> tuple[float, float, float]:
        """1 - the smallest cosine, 1 - the mean cosine, and the largest difference of norms."""
        mean = statistics.fmean(self.cosines.values())
        return 1.0 - self.cosines[self.worst], 1.0 - mean, abs(self.norms[self.longest])


def first_two_layers(flags: Sequence[str]) -> list[str]:
    """Returns flags of the model's first two layers."""
    pattern = []
    if "--moe-layer-freq" in flags:
        every = layer_pattern(flags[flags.index("--moe-layer-freq") + 1])
        pattern = ["--moe-layer-freq", str(every if isinstance(every, int) else every[:2])]
    return [*flags, "--num-layers", "2", *pattern]


def build(flags: Sequence[str], vocabulary: int) -> DistributedDataParallel:
    """Returns the model that the flags describe, wrapped, with weights that bfloat16 can represent."""
    try:
        config = configure([*COMMON.split(), "--vocab-size", str(vocabulary), *flags, "--train-iters", "1"])
    except ConfigurationError as error:
        exit_with_problems(error)
    length = config.data.seq_length
    assert length is not None
    transformer = config.transformer
    gc.collect()  # the memory of the model before
    with torch.device("meta"):  # the wrapper draws the initial values on the device
        model = GPTModel(
            transformer,
            get_gpt_decoder_block_spec(transformer, use_transformer_engine=False),
            vocabulary,
            length,
            position_embedding_type=config.model.position_embedding_type,
            rotary_base=config.model.rotary_base,
            share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(transformer, ddp, model, device=DEVICE)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(parameter.data.bfloat16())
    return wrapped


def backward(model: DistributedDataParallel, ids: Tensor) -> float:
    """Adds the gradients of the mean loss of [b, s + 1] token ids to the main gradients; returns the loss."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None].expand(ids.shape[0], -1)
    loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).float().mean()
    loss.backward()
    return float(loss.detach())


def passes(
    flags: Sequence[str], vocabulary: int, batches: Sequence[Tensor], exact: Sequence[Pass] | None = None
) -> Iterator[Pass]:
    """Yields each micro-batch's pass through one model. Routers choose, or take what they chose in `exact`."""
    has_experts = any(flag.startswith("--num-experts") for flag in flags)
    model = build([*flags, *["--moe-enable-routing-replay"] * has_experts], vocabulary)
    if ENGINE[1] in flags and backends.choose_backend(model.config).engine is None:
        end_without_engine(why_layers_stay_ours(model.config) or backends.find_engine())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    replays = router_replays(model)
    warm = WARM if "delayed" in flags else 0
    for number in [*[0] * warm, *range(len(batches))]:
        model.zero_grad_buffer()
        for router, replay in enumerate(replays):
            if exact is None:
                replay.record()
            else:
                replay.replay(exact[number].experts[router])
        loss = backward(model, batches[number])
        finalize_model_grads([model])
        warm -= 1
        if warm < 0:
            found = {name: p.main_grad for name, p in named.items()}  # type: ignore[attr-defined]
            yield Pass(found, loss, [replay.recorded for replay in replays])


def end_without_engine(reason: object) -> NoReturn:
    """Ends with an error: what is measured as Transformer Engine's would be our own layers'."""
    exit_with_problems(UserError(f"{' '.join(ENGINE)}: Transformer Engine does not compute: {reason}"))


def references(flags: Sequence[str], vocabulary: int, batches: Sequence[Tensor]) -> list[Pass]:
    """Returns the passes in float32, which stay on the device."""
    return [
        Pass({name: tensor.float().clone() for name, tensor in found.gradients.items()}, found.loss, found.experts)
        for found in passes(flags, vocabulary, batches)
    ]


def compare(ours: Pass, exact: Pass) -> Errors:
    """Compares the gradients of a micro-batch, except those that are zero in float32."""
    numbers = []
    for name, gradient in exact.gradients.items():
        one, other = ours.gradients[name].flatten().double(), gradient.flatten().double()
        numbers.append(torch.stack([one @ other, one @ one, other @ other]))
    cosines, norms = {}, {}
    for name, (product, own, other) in zip(exact.gradients, torch.stack(numbers).tolist(), strict=True):
        if other == 0.0:
            continue
        cosines[name] = product / math.sqrt(own * other) if own else 0.0
        norms[name] = math.sqrt(own / other) - 1.0
    return Errors(ours.loss, cosines, norms)


def line(found: Sequence[Errors]) -> str:
    """Returns the worst of all micro-batches and, if there are several, means."""
    worst, longest = min(found, key=lambda e: e.cosines[e.worst]), max(found, key=lambda e: e.distances[2])
    text = (
        f"loss {statistics.fmean(errors.loss for errors in found):.5f}, "
        f"cosine at least {worst.cosines[worst.worst]:.5f} ({worst.worst}), "
        f"norms within {longest.norms[longest.longest]:+.2%} ({longest.longest})"
    )
    if len(found) > 1:
        smallest, mean, norms = (statistics.fmean(column) for column in zip(*(e.distances for e in found), strict=True))
        text += (
            f"; means of {len(found)}: smallest cosine {1 - smallest:.5f}, all cosines {1 - mean:.5f}, "
            f"largest difference of norms {norms:.2%}"
        )
    return text


def verdict(ours: Sequence[Errors], theirs: Sequence[Errors]) -> str:
    """Returns a line that says whether our gradients are as near to float32's as others of the same micro-batches. They
    are worse if a mean distance is larger by more than two standard errors of the difference."""
    texts, worse = [], False
    for name, own, other in zip(
        ("1 - smallest cosine", "1 - mean cosine", "largest difference of norms"),
        zip(*(errors.distances for errors in ours), strict=True),
        zip(*(errors.distances for errors in theirs), strict=True),
        strict=True,
    ):
        apart = [a - b for a, b in zip(own, other, strict=True)]
        spread = 2 * statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        mean = statistics.fmean(apart)
        worse |= mean > spread
        means = f"{statistics.fmean(own):.5f} ours, {statistics.fmean(other):.5f} theirs"
        texts.append(f"{name} {means} ({mean:+.5f} +- {spread:.5f})")
    return f"{'; '.join(texts)}: {'worse' if worse else 'no worse'}"


@dataclass(frozen=True)
class Curves:
    """Losses of training runs on parts of a text."""

    vocabulary: int
    text: Tensor
    """[bytes]"""
    length: int
    """Tokens of a row; a step has two rows."""
    steps: int
    parts: int
    peak_lr: float = 3e-4

    def losses(self, flags: Sequence[str]) -> list[list[float]]:
        """Returns the losses of the model that the flags describe, [parts, steps]."""
        return [self._part(flags, part) for part in range(self.parts)]

    def kept(self, flags: Sequence[str], file: Path | None) -> list[list[float]]:
        """Returns `losses`, which `file` keeps."""
        if file is None:
            return self.losses(flags)
        setting = (self.vocabulary, self.length, self.steps, self.peak_lr, WARMUP, str(DEVICE), torch.__version__)
        about = repr((*first_two_layers(flags), *setting))
        digest = hashlib.sha256(about.encode() + self.text.cpu().numpy().tobytes()).hexdigest()
        found = json.loads(file.read_text()) if file.exists() else {}
        if len(found.get(digest, [])) < self.parts:
            found[digest] = self.losses(flags)
            file.write_text(json.dumps(found))
        return found[digest][: self.parts]

    def _part(self, flags: Sequence[str], part: int) -> list[float]:
        model = build(first_two_layers(flags), self.vocabulary)
        bf16 = "--bf16" in flags
        config = OptimizerConfig(lr=self.peak_lr, bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32)
        optimizer = get_megatron_optimizer(config, [model])
        losses = []
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.peak_lr * min(1.0, (step + 1) / (WARMUP * self.steps))
            model.zero_grad_buffer()
            losses.append(backward(model, self._rows(2 * (part * self.steps + step))))
            finalize_model_grads([model])
            optimizer.step_on_device()
        return losses

    def _rows(self, first: int) -> Tensor:
        starts = [row * self.length % (self.text.numel() - self.length - 1) for row in (first, first + 1)]
        return torch.stack([self.text[start : start + self.length + 1] for start in starts])


def apart(found: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> str:
    """Returns how losses differ from those of the same parts in float32."""
    pairs = list(zip(found, reference, strict=True))
    most = max(abs(one - other) for ours, exact in pairs for one, other in zip(ours, exact, strict=True))
    tails = [statistics.fmean(ours[-10:]) - statistics.fmean(exact[-10:]) for ours, exact in pairs]
    error = f" +- {statistics.stdev(tails) / math.sqrt(len(tails)):.4f}" if len(tails) > 1 else ""
    last = statistics.fmean(ours[-1] for ours in found)
    return f"last loss {last:.4f}, at most {most:.4f} apart, mean of the last ten {statistics.fmean(tails):+.4f}{error}"


def tokens(vocabulary: int, length: int, seed: int) -> Tensor:
    """Returns the ids of one row of length + 1 tokens, as frequent as Zipf's law says."""
    drawn = torch.rand(1, length + 1, generator=torch.Generator().manual_seed(seed))
    return ((vocabulary**drawn) - 1).long().to(DEVICE)


def main(words: Sequence[str] | None = None) -> None:
    """Computes gradients with each recipe, and trains with it if asked to; prints how far both are from float32."""
    parser = parser_of(__doc__)
    parser.add_argument("--cell", choices=CELLS, help="a model of the speed table")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=4096, help="length of a micro-batch's one row")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="micro-batches with other tokens")
    parser.add_argument(
        "--against-transformer-engine", action="store_true", help="compare our fp8 with Transformer Engine's layers"
    )
    parser.add_argument("--curve", type=int, default=0, metavar="N", help="compare the losses of N steps too")
    parser.add_argument("--curves", type=int, default=1, metavar="M", help="parts of the text, a curve each")
    parser.add_argument("--peak-lr", type=float, default=3e-4, help="largest learning rate of the curve")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keeps the curves of float32")
    parser.add_argument("--text", type=Path, help="file or folder whose bytes are the tokens of the curve")
    args, flags = parser.parse_known_args(words)
    if args.against_transformer_engine:
        # It cannot be imported once torch has loaded its own cuDNN, as attention does.
        engine = backends.find_engine()
        if isinstance(engine, str):
            end_without_engine(engine)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = [*(CELLS[args.cell].split() if args.cell else []), *flags]
    batches = [tokens(args.vocabulary, args.tokens, seed + 1) for seed in range(args.micro_batches)]
    kinds = {"bf16": ("--bf16",)} | {f"fp8 {recipe}": RECIPES[recipe] for recipe in args.recipes}
    start = time.monotonic()
    exact = references(model, args.vocabulary, batches)
    print(f"float32: loss {statistics.fmean(found.loss for found in exact):.5f}", flush=True)

    def measured(name: str, more: Sequence[str]) -> list[Errors]:
        both = zip(passes([*model, *more], args.vocabulary, batches, exact), exact, strict=True)
        found = [compare(ours, reference) for ours, reference in both]
        print(f"{name}: {line(found)} [{time.monotonic() - start:.0f} s]", flush=True)
        return found

    for name, more in kinds.items():
        ours = measured(name, more)
        if args.against_transformer_engine and more[-1] != "--bf16":
            compared = verdict(ours, measured(f"{name} by Transformer Engine", [*more, *ENGINE]))
            print(f"{name} beside Transformer Engine: {compared}", flush=True)
    if args.curve:
        files = sorted(args.text.rglob("*.py")) if args.text.is_dir() else [args.text]
        data = b"".join(file.read_bytes() for file in files)
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().to(DEVICE)
        length = min(1024, args.tokens)
        curves = Curves(args.vocabulary, text, length, args.curve, args.curves, args.peak_lr)
        reference = curves.kept(model, args.keep)
        first, last = (statistics.fmean(losses[step] for losses in reference) for step in (0, -1))
        print(f"float32: losses {first:.4f} to {last:.4f}, perplexity {math.exp(last):.2f}", flush=True)
        for name, more in kinds.items():
            print(f"{name}: {apart(curves.losses([*model, *more]), reference)}", flush=True)
            if args.against_transformer_engine and more[-1] != "--bf16":
                theirs = curves.losses([*model, *more, *ENGINE])
                print(f"{name} by Transformer Engine: {apart(theirs, reference)}", flush=True)


if __name__ == "__main__":
    run_main(main)
