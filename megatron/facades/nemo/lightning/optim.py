"""`MegatronOptimizerModule`: the optimizer of a run."""

from collections.abc import Sequence

from megatron.core.optimizer import OptimizerConfig
from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, Foreign, shown
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.lr_scheduler import LRSchedulerModule

_GROUPS = "leave it out; --no-weight-decay-cond-type and --decoupled-lr (MegatronStrategy(flags=[...])) choose weights"

ARGUMENTS: Sequence[Argument] = (
    Argument("config"),
    Argument("lr_scheduler"),
    Argument("no_weight_decay_cond", refusal=_GROUPS),
    Argument("scale_lr_cond", refusal=_GROUPS),
    Argument("lr_mult", 1.0, refusal=_GROUPS),
)


class MegatronOptimizerModule(ArgumentValues):
    """The optimizer, an `OptimizerConfig` of megatron.core, and the schedule of its learning rate."""

    table = ARGUMENTS
    config: OptimizerConfig | None
    lr_scheduler: LRSchedulerModule | None

    def connect(self, model: Foreign) -> None:
        """Makes a module use this optimizer, as modules that follow NeMo's own do in their constructor."""
        model.optim = self

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of optimizer and schedule."""
        super().give_flags(flags)
        if not isinstance(self.config, OptimizerConfig):
            what = f"MegatronOptimizerModule(config={shown(self.config)})"
            flags.refuse(what, "give an OptimizerConfig of megatron.core.optimizer")
            return
        not_flags = ("params_dtype", "store_param_remainders", "decoupled_weight_decay", "timers")
        flags.give_fields(self.config, OptimizerConfig, not_flags)
        if self.lr_scheduler is None:
            flags.give("lr_decay_style", "constant")
        elif not hasattr(self.lr_scheduler, "give_flags"):
            what = f"MegatronOptimizerModule(lr_scheduler={shown(self.lr_scheduler)})"
            flags.refuse(what, "give a schedule of nl.lr_scheduler, such as CosineAnnealingScheduler")
        else:
            self.lr_scheduler.give_flags(flags)
