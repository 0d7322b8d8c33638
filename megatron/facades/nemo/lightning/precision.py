"""`MegatronMixedPrecision`: the number formats of a run."""

from collections.abc import Sequence

import torch

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, shown
from megatron.facades.nemo.lightning.flags import Flags

FORMATS = {"bf16-mixed": "bf16", "bf16": "bf16", "16-mixed": "fp16", "16": "fp16", "fp16": "fp16", "32": None}
"""Texts of `precision`, and the switch that each means. 32-true is another spelling of 32."""

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}
_BF16_EVERYWHERE = "attention is computed in the type of the model; give flash attention through --attention-backend"

ARGUMENTS: Sequence[Argument] = (
    Argument("precision"),
    Argument("params_dtype"),
    Argument("pipeline_dtype"),
    Argument("autocast_dtype", note="the layers have the type of the model; nothing is converted at each operation"),
    Argument("autocast_enabled", False, refusal="leave it out; the layers have the type of the model"),
    Argument("grad_reduce_in_fp32", True),
    Argument("fp8", None, "fp8"),
    Argument("fp8_recipe", "delayed"),
    Argument("first_last_layers_bf16", False),
    Argument("fp8_margin", 0),
    Argument("fp8_amax_history_len", 1),
    Argument("fp8_amax_compute_algo", "most_recent"),
    Argument("fp8_wgrad", True),
    Argument("fp8_dot_product_attention", False, refusal=f"leave it out; {_BF16_EVERYWHERE}"),
    Argument("fp8_multi_head_attention", False, refusal=f"leave it out; {_BF16_EVERYWHERE}"),
    Argument("fp8_params"),
    Argument("fp8_param_gather"),
    Argument("fp16_loss_scale"),
    Argument("fp16_initial_loss_scale", 4294967296),
    Argument("fp16_min_loss_scale", 1.0),
    Argument("fp16_loss_scale_window", 1000),
    Argument("fp16_hysteresis", 2),
    Argument("num_layers_at_start_in_bf16", 0),
    Argument("num_layers_at_end_in_bf16", 0),
    Argument("reuse_grad_buf_for_mxfp8_param_ag", False, note="weights in mxfp8 are gathered in the model's type"),
)

_WITH_FP8 = (
    "fp8_recipe",
    "first_last_layers_bf16",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
)
_WITH_FP16 = {
    "fp16_loss_scale": "loss_scale",
    "fp16_initial_loss_scale": "initial_loss_scale",
    "fp16_min_loss_scale": "min_loss_scale",
    "fp16_loss_scale_window": "loss_scale_window",
    "fp16_hysteresis": "hysteresis",
}


class MegatronMixedPrecision(ArgumentValues):
    """The number formats of a run: precision="bf16-mixed", "16-mixed" or "32", and the settings of fp8 and of the loss
    scale."""

    table = ARGUMENTS
    lightning_class = "plugins", "Precision"
    precision: object
    params_dtype: object
    pipeline_dtype: object
    grad_reduce_in_fp32: bool
    fp8: str | None
    fp8_params: bool | None
    fp8_param_gather: bool | None

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of number formats."""
        super().give_flags(flags)
        give_precision(flags, self.precision)
        switch = switch_of(self.precision)
        for name in ("params_dtype", "pipeline_dtype"):
            given = getattr(self, name)
            if given not in (None, _TYPES[switch]):
                what = f"MegatronMixedPrecision({name}={given})"
                flags.refuse(what, f"leave it out; precision={shown(self.precision)} makes it {_TYPES[switch]}")
        if switch is not None:
            flags.give("grad_reduce_in_bf16", not self.grad_reduce_in_fp32)
        if switch == "fp16":
            for name, field in _WITH_FP16.items():
                flags.give(field, getattr(self, name))
        if self.fp8 is not None:
            for name in _WITH_FP8:
                flags.give(name, getattr(self, name))
            gathers = self.fp8_param_gather if self.fp8_param_gather is not None else self.fp8_params
            flags.give("fp8_param_gather", bool(gathers))
            if flags.values["first_last_layers_bf16"]:
                for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
                    flags.give(name, getattr(self, name))


def switch_of(precision: object) -> str | None:
    """Returns the switch of the model's type (bf16 or fp16); None for float32 and for a text that means nothing."""
    return FORMATS.get(str(precision).removesuffix("-true")) if str(precision) not in ("16-true",) else None


def give_precision(flags: Flags, precision: object) -> None:
    """Sets the type of the model from a `precision` of Lightning, such as "bf16-mixed" or 32."""
    known = str(precision).removesuffix("-true")
    if known not in FORMATS or str(precision) == "16-true":
        flags.refuse(f"precision={shown(precision)}", 'give "bf16-mixed", "16-mixed" or "32"')
        return
    switch = FORMATS[known]
    for each in ("bf16", "fp16"):
        flags.give(each, each == switch)
