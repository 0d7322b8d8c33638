"""When the model is evaluated, and on how much."""

from dataclasses import dataclass

from megatron.core.config_fields import not_yet


@dataclass(kw_only=True, frozen=True)
class EvaluationConfig:
    """Validation during training, and validation and test at its end."""

    eval_interval: int | None = None
    """Steps between two evaluations; without, there are none during training."""

    eval_iters: int = 100
    """Global batches of one evaluation; 0: no evaluation at all."""

    skip_train: bool = False
    """Evaluate and exit."""

    full_validation: bool = not_yet(False)
    """Evaluate on the whole validation data each time."""

    multiple_validation_sets: bool = not_yet(False)
    """Evaluate on each validation data set apart."""

    eval_global_batch_size: int | None = not_yet(None)
    """Global batch size of evaluation; that of training when not given."""

    eval_micro_batch_size: int | None = not_yet(None)
    """Micro batch size of evaluation; that of training when not given."""
