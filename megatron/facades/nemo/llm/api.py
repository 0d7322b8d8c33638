"""`pretrain`, `train` and `validate` of NeMo."""

from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.facades.nemo.lightning.arguments import Foreign


def train(
    model: Foreign,
    data: Foreign,
    trainer: Foreign,
    log: Foreign = None,
    resume: Foreign = None,
    optim: Foreign = None,
    tokenizer: Foreign = None,
    model_transform: object = None,
) -> Path | None:
    """Trains a model. Returns the folder of `log`, None without it. `tokenizer`: a tokenizer, or "data" or "model" for
    that of one of them. Raises UserError with `model_transform`."""
    _prepare(model, data, trainer, log, resume, optim, tokenizer, model_transform)
    trainer.fit(model, datamodule=data)
    return None if log is None else Path(log.folder)


def pretrain(
    model: Foreign, data: Foreign, trainer: Foreign, log: Foreign = None, resume: Foreign = None, optim: Foreign = None
) -> Path | None:
    """Trains a model with the tokenizer of the data; see `train`."""
    return train(model, data, trainer, log, resume, optim, tokenizer="data")


def validate(
    model: Foreign,
    data: Foreign,
    trainer: Foreign,
    log: Foreign = None,
    resume: Foreign = None,
    optim: Foreign = None,
    tokenizer: Foreign = None,
    model_transform: object = None,
) -> Path | None:
    """Evaluates a model on the validation data. Returns the folder of `log`, None without it."""
    _prepare(model, data, trainer, log, resume, optim, tokenizer, model_transform)
    trainer.validate(model, datamodule=data)
    return None if log is None else Path(log.folder)


def _prepare(
    model: Foreign,
    data: Foreign,
    trainer: Foreign,
    log: Foreign,
    resume: Foreign,
    optim: Foreign,
    tokenizer: Foreign,
    model_transform: object,
) -> None:
    """Gives model and trainer the objects that a run needs."""
    if model_transform is not None:
        raise UserError("model_transform: not yet; change the network in configure_model")
    if optim is not None:
        model.optim = optim
    if tokenizer == "data":
        model.tokenizer = getattr(data, "tokenizer", None) or getattr(model, "tokenizer", None)
    elif tokenizer not in (None, "model"):
        model.tokenizer = tokenizer
    if log is not None:
        log.setup(trainer)
    if resume is not None:
        resume.setup(trainer, model)
