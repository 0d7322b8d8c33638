"""Rules for batch sizes, the length of training, and the schedules of learning rate and weight decay."""

from collections.abc import Iterator

from megatron.training.config.parallel_checks import multiples_near
from megatron.training.config.settings import Settings, batch_steps


def global_batch(s: Settings) -> Iterator[str]:
    """The batch divides into micro-batches of all data parallel ranks, at every size of a ramp-up or schedule."""
    micro, total, accumulated = s.micro_batch_size, s.global_batch_size, s.gradient_accumulation_steps
    replicas = f"{s.data_parallel_size} data parallel ranks"
    if micro is None and total and accumulated:
        yield f"{{global_batch_size}} is not divisible by {{gradient_accumulation_steps}} x {replicas}"
    if not micro or micro < 1 or not total or total < 1:
        return
    step = micro * s.data_parallel_size
    if accumulated and accumulated > 0 and total != step * accumulated:
        yield (
            f"{{gradient_accumulation_steps}} x {{micro_batch_size}} x {replicas} is {step * accumulated}, but "
            "{global_batch_size}; leave one of the three out"
        )
        return
    sizes = [("{global_batch_size}", total)]
    if s.rampup_batch_size is not None and min(s.rampup_batch_size) > 0:
        start, increment, _ = s.rampup_batch_size
        sizes += [
            (f"the batch size {size} of {{rampup_batch_size:name}}", size)
            for size in range(start, total, increment)[:2]  # if both divide, all do
        ]
    steps = batch_steps(s)
    if steps is not None:
        sizes += [(f"the batch size {size} of {{step_batch_size_schedule:name}}", size) for _, size in steps.steps]
    for name, size in sizes:
        if s.decrease_batch_size_if_needed and size >= step:
            continue
        if size % step:
            yield f"{name} is not divisible by {{micro_batch_size}} x {replicas}; use {multiples_near(size, step)}"
            return


def evaluation_batch(s: Settings) -> Iterator[str]:
    """The batch of an evaluation divides into its micro-batches. Checked only if it has its own sizes."""
    if s.eval_global_batch_size is None and s.eval_micro_batch_size is None:
        return
    micro, total = s.eval_micro_batch_size or s.micro_batch_size, s.eval_global_batch_size or s.global_batch_size
    if not micro or not total or min(micro, total) < 1 or not total % (micro * s.data_parallel_size):
        return
    names = ("eval_" if s.eval_global_batch_size else "", "eval_" if s.eval_micro_batch_size else "")
    yield (
        f"{{{names[0]}global_batch_size}} of an evaluation is not divisible by {{{names[1]}micro_batch_size}} x "
        f"{s.data_parallel_size} data parallel ranks; use {multiples_near(total, micro * s.data_parallel_size)}"
    )


def length_of_training(s: Settings) -> Iterator[str]:
    """The length of training is given in one way."""
    if s.is_given("train_iters") and s.is_given("train_samples"):
        yield "{train_iters} and {train_samples} say how long to train in two ways; give one"


_MOST_SAMPLES = 10**11


def samples_of_run(s: Settings) -> Iterator[str]:
    """The order of the samples, which is computed before training, fits into the memory of a large machine. Data sets
    of a script may have none."""
    if s.datasets_of_script or s.dataloader_type == "external":
        return
    batch = s.global_batch_size or 0
    for samples, flags in (
        (s.train_samples or 0, "{train_samples}"),
        (0 if s.train_samples else (s.train_iters or 0) * batch, "{train_iters} x {global_batch_size}"),
        ((s.eval_iters or 0) * (s.eval_global_batch_size or batch), "{eval_iters} x {global_batch_size}"),
    ):
        if samples > _MOST_SAMPLES:
            yield f"{flags} are {samples} samples; at most {_MOST_SAMPLES} are possible"


def one_unit_of_schedule(s: Settings) -> Iterator[str]:
    """The schedule is given in the unit of the run's length: in samples with --train-samples, otherwise in steps."""
    unit, wrong_unit = ("samples", "iters") if s.is_given("train_samples") else ("iters", "samples")
    for length in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        field = f"{length}_{wrong_unit}"
        if s.is_given(field) and getattr(s, field):
            yield f"{{{field}}} does not go with {{train_{unit}:name}}; give {{{length}_{unit}:name}}"


def warmup(s: Settings) -> Iterator[str]:
    """The warm-up is shorter than the decay, and starts below the peak."""
    for unit in ("iters", "samples"):
        warmup, decay = f"lr_warmup_{unit}", f"lr_decay_{unit}"
        total = getattr(s, decay)
        if total is not None and getattr(s, warmup) >= max(total, 1):
            length = decay if s.is_given(decay) else f"train_{unit}"
            yield f"{{{warmup}}} leaves nothing of {{{length}}} to decay over; it must be less"
    if s.lr is not None and 0 <= s.lr < s.lr_warmup_init:
        yield "{lr_warmup_init} is larger than {lr}"


def end_decay(s: Settings) -> Iterator[str]:
    """WSD has the length of its decay, which is not longer than the schedule."""
    if s.lr_decay_style == "WSD":
        field = "lr_wsd_decay_samples" if s.is_given("train_samples") else "lr_wsd_decay_iters"
        if getattr(s, field) is None:
            yield f"{{lr_decay_style}} needs {{{field}:name}}: the length of the decay at the end"
        for unit in ("iters", "samples"):
            decay, whole = getattr(s, f"lr_wsd_decay_{unit}"), getattr(s, f"lr_decay_{unit}")
            if decay is not None and whole is not None and decay > whole:
                length = f"lr_decay_{unit}" if s.is_given(f"lr_decay_{unit}") else f"train_{unit}"
                yield f"{{lr_wsd_decay_{unit}}} is longer than the whole schedule, {{{length}}}"


def weight_decay(s: Settings) -> Iterator[str]:
    """A weight decay that changes has a style that says how."""
    if s.weight_decay_incr_style != "constant":
        return
    for field in ("start_weight_decay", "end_weight_decay"):
        if getattr(s, field) is not None and getattr(s, field) != s.weight_decay:
            yield f"{{{field}}} needs {{weight_decay_incr_style:name}} linear or cosine, or to equal {{weight_decay}}"
