"""The sections `optimizer` and `scheduler` of DeepSpeed's JSON."""

from megatron.core.exceptions import UserError
from megatron.training.config.foreign.answers import Reading, Values, number, shown

_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
_OPTIMIZERS = {
    "muon": "its scales and splits are other ones: give --optimizer muon and its flags (--help muon)",
    "lamb": "there is no LAMB; Adam and SGD work, and --optimizer muon",
    "lion": "Lion updates only what muon leaves: give --optimizer muon --muon-scalar-optimizer lion, or Adam",
    "adagrad": "there is no Adagrad; Adam and SGD work",
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        "gradients are not compressed to one bit; Adam works, with --grad-reduce-in-bf16 for 16 bits",
    ),
}
_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULES = {
    "OneCycle": "there are no cycles of rate and momentum",
    "LRRangeTest": "no rates are searched within a run; tools/sweep.py compares runs of several rates",
}
_PARAMS_OF = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}


def read_optimizer(reading: Reading, values: Values) -> None:
    """Takes the update rule and the settings that no key of the table is by itself. Defaults are those of the rule:
    weight decay is 0 where the file does not give it."""
    kind = values.get("optimizer.type")
    if kind is None:
        return
    name, params = "optimizer.type", "optimizer.params"
    rule = str(kind).lower()
    if rule == "sgd":
        reading.take(name, "optimizer", "sgd")
        reading.take(f"{params}.momentum", "sgd_momentum", 0.0, stated=False)
    elif rule in _ADAM:
        reading.take(name, "optimizer", "adam")
        _take_betas(reading, values)
        reading.take(f"{params}.eps", "adam_eps", 1e-8, stated=False)
    else:
        raise UserError(f"{name} {shown(kind)}: {_OPTIMIZERS.get(rule, 'no such update; Adam, AdamW and SGD work')}")
    reading.take(f"{params}.lr", "lr", 1e-3, stated=False)
    reading.take(f"{params}.weight_decay", "weight_decay", 0.0, stated=False)
    decay = values.get(f"{params}.weight_decay")
    if rule == "sgd" and isinstance(decay, int | float) and decay:
        reading.note(f"{params}.weight_decay {decay}", "acts on the weights, not on the gradient")


def _take_betas(reading: Reading, values: Values) -> None:
    name = "optimizer.params.betas"
    betas = values.get(name, (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise UserError(f"{name} {shown(betas)}: expected two numbers")
    for field, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        if beta != "auto":
            reading.take(name, field, _number(name, beta), stated=name in values)


def read_scheduler(reading: Reading, values: Values) -> None:
    """Takes the schedule of the learning rate. DeepSpeed's counts one step later: its first two steps have the first
    rate."""
    kind = values.get("scheduler.type")
    if kind is None:
        return
    if kind not in _STYLES:
        reason = _SCHEDULES.get(str(kind), "no such schedule")
        raise UserError(f"scheduler.type {shown(kind)}: {reason}; {', '.join(_STYLES)} work")
    given = {key.removeprefix("scheduler.params."): key for key in values if key.startswith("scheduler.params.")}
    for param in ("warmup_min_lr", "warmup_max_lr", "total_num_steps", "warmup_min_ratio", "cos_min_ratio"):
        if param in given and param not in _PARAMS_OF[kind]:
            reading.refuse(given[param], f"{kind} has {', '.join(_PARAMS_OF[kind])}, warmup_num_steps, warmup_type")
    reading.take("scheduler.type", "lr_decay_style", _STYLES[kind])
    reading.take("scheduler.params.warmup_num_steps", "lr_warmup_iters", 1000, stated=False, unless=_LENGTHS)
    reading.take("scheduler.params.warmup_type", "lr_warmup_style", "log", stated=False)
    if kind == "WarmupCosineLR":
        _take_ratios(reading, values)
    else:
        _take_rates(reading, values, decays=kind == "WarmupDecayLR")


_LENGTHS = ("lr_warmup_fraction", "lr_warmup_samples")


def _take_rates(reading: Reading, values: Values, decays: bool) -> None:
    low, high = "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"
    if high not in reading.automatic:
        rate = values.get(high, 1e-3)
        of_optimizer = values.get("optimizer.params.lr", rate)
        reading.settings = [one for one in reading.settings if one.field != "lr"]  # the optimizer's is not used
        reading.take(high, "lr", rate, stated=high in values)
        if of_optimizer != rate:
            reading.note(f"optimizer.params.lr {shown(of_optimizer)}", f"has no effect: {high} is {shown(rate)}")
    first = values.get(low, 0.0)
    reading.take(low, "lr_warmup_init", first, stated=low in values)
    if decays:
        reading.take(low, "min_lr", first, stated=low in values)


def _take_ratios(reading: Reading, values: Values) -> None:
    rate = values.get("optimizer.params.lr", 1e-3)
    for name, field, default in (
        ("scheduler.params.warmup_min_ratio", "lr_warmup_init", 0.0),
        ("scheduler.params.cos_min_ratio", "min_lr", 1e-4),
    ):
        share = values.get(name, default)
        if "optimizer.params.lr" not in values and name in values:
            raise UserError(f"{name} is a share of optimizer.params.lr, which the file must give")
        reading.take(name, field, share * rate, stated=name in values)


def _number(name: str, value: object) -> float:
    try:
        return number(value)
    except ValueError as error:
        raise UserError(f"{name} {shown(value)}: {error}") from None
