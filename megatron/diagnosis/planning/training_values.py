"""Batch size, learning rate and length of a run, each from the specification or a published measurement."""

import math
from dataclasses import dataclass

from megatron.diagnosis.planning.model_shape import ModelShape
from megatron.diagnosis.planning.quantities import short

_LAW = "law of Bi et al. 2024 (arXiv:2401.02954, section 3.1)"
_LEAST_COMPUTE = 1e17
"""FLOP of the smallest runs to which the law was fitted; smaller runs have the values of these."""

_WARMUP_STEPS = 2000
"""Steps of warm-up of Llama 2 (arXiv:2307.09288, section 2.2) and DeepSeek LLM."""

MTBF_GPU_HOURS = 54 * 24 * 16384 / 466
"""Mean GPU-hours between two interruptions: 466 in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4)."""

OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022 (arXiv:2203.15556)."""


@dataclass(frozen=True)
class TrainingValues:
    """Batch size, learning rate and length of a run."""

    global_batch_size: int
    batch_reason: str
    lr: float
    min_lr: float
    lr_reason: str
    warmup_iters: int
    warmup_reason: str
    train_iters: int
    iters_reason: str

    def tokens(self, seq_length: int) -> int:
        """Tokens of the whole run."""
        return self.train_iters * self.global_batch_size * seq_length


def training_values(
    shape: ModelShape, tokens: int, seq_length: int, gpus: int, global_batch_size: int | None = None
) -> TrainingValues:
    """Returns the values of a run of `tokens` tokens. `global_batch_size` is the user's own; None: chosen."""
    compute = max(_LEAST_COMPUTE, 6.0 * shape.active_parameters * tokens)
    batch, batch_reason = _batch(compute, tokens, seq_length, gpus)
    if global_batch_size is not None:
        batch, batch_reason = global_batch_size, "--global-batch-size"
    iters = math.ceil(tokens / (batch * seq_length))
    published = shape.basis.training.get("lr")
    if published is not None and shape.flags == shape.basis.flags:
        lr, lr_reason = float(published), f"published: {shape.basis.name}"
    else:
        lr = float(f"{0.3118 * compute**-0.1250:.2g}")
        lr_reason = f"{_LAW}: 0.3118 C^-0.125 for C = {compute:.3g} FLOP"
    warmup = max(1, min(_WARMUP_STEPS, iters // 100))
    return TrainingValues(
        global_batch_size=batch,
        batch_reason=batch_reason,
        lr=lr,
        min_lr=float(f"{lr / 10:.3g}"),
        lr_reason=lr_reason,
        warmup_iters=warmup,
        warmup_reason=(
            f"{_WARMUP_STEPS} steps as Llama 2 (arXiv:2307.09288)" if warmup == _WARMUP_STEPS else "1% of the steps"
        ),
        train_iters=iters,
        iters_reason=f"{short(tokens)} tokens / ({batch:,} samples x {seq_length:,} tokens)",
    )


def _batch(compute: float, tokens: int, seq_length: int, gpus: int) -> tuple[int, str]:
    """Returns the samples of a step: near the law's tokens, and a number that many data parallel sizes divide. A step
    has at most a hundredth of the run's tokens."""
    wanted_tokens = min(0.2920 * compute**0.3271, tokens / 100)
    wanted = max(1.0, wanted_tokens / seq_length)
    multiples = {gpus * factor << power for factor in (1, 3) for power in range(24)}
    divisors = {gpus // part for part in range(1, gpus + 1) if gpus % part == 0}
    powers = {1 << power for power in range(24)} if gpus & (gpus - 1) == 0 else set()
    batch = min(multiples | divisors | powers, key=lambda size: (abs(math.log(size / wanted)), size))
    return batch, (
        f"{batch * seq_length / 1e6:.3g}M tokens a step; {_LAW} gives 0.292 C^0.3271 = "
        f"{0.2920 * compute**0.3271 / 1e6:.3g}M; a number that data parallel sizes divide"
    )


def checkpoint_interval(step_seconds: float, gpus: int, checkpoint_bytes: float) -> tuple[int, str]:
    """Returns the steps between two checkpoints that lose least time: Young 1974, sqrt(2 x time of a checkpoint x mean
    time between failures); at most 1,000, so that a round trip comes early."""
    save_seconds = 10 + checkpoint_bytes / (2e9 * max(1, gpus // 8))
    between_failures = MTBF_GPU_HOURS * 3600 / gpus
    steps = math.sqrt(2 * save_seconds * between_failures) / step_seconds
    rounded = max(10, min(1000, round(steps / 10) * 10 if steps < 500 else round(steps / 100) * 100))
    bound = "; at most 1,000, for an early round trip" if steps > 1000 else ""
    return rounded, (
        f"Young's formula: a save of about {save_seconds:.0f} s (assumed: 2 GB/s a node), a failure each "
        f"{between_failures / 3600:.3g} hours (arXiv:2407.21783: one in {MTBF_GPU_HOURS:,.0f} GPU-hours){bound}"
    )
