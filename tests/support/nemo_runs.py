"""Tiny runs of nl.Trainer, and listeners that write down the order of their calls."""

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm

FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 50 "
    "--train-iters 3 --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 1 --min-lr 1e-3 --eval-iters 2 "
    "--eval-interval 2 --log-interval 1"
)
"""The run of `trainer_of(3)`, `gpt` and `made_up_data`, dropout included, as a command line."""


def trainer_of(steps: int, *, flags: Sequence[str] = (), callbacks: Any = None, **layout: Any) -> nl.Trainer:
    """A trainer that validates two batches every other step."""
    return nl.Trainer(
        strategy=nl.MegatronStrategy(flags=flags, ckpt_async_save=False, **layout),
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=2,
        limit_val_batches=2,
        limit_test_batches=2,
        log_every_n_steps=1,
        callbacks=callbacks,
    )


def gpt(cls: type[llm.GPTModel] = llm.GPTModel, **sizes: Any) -> Any:
    """A GPT of four layers, with its optimizer."""
    known = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 50}
    schedule = nl.lr_scheduler.CosineAnnealingScheduler(warmup_steps=1, constant_steps=0, min_lr=1e-3)
    optim = nl.MegatronOptimizerModule(OptimizerConfig(optimizer="adam", lr=1e-2), schedule)
    return cls(llm.GPTConfig(**known | {"bias_activation_fusion": True} | sizes), optim=optim)


def made_up_data() -> llm.MockDataModule:
    """Made-up data of two micro-batches a step."""
    return llm.MockDataModule(seq_length=16, micro_batch_size=2, global_batch_size=4, num_workers=0)


_KINDS = [
    f"on_{kind}_{rest}"
    for kind in ("train", "validation", "test")
    for rest in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
]
CALLS = (*_KINDS, "on_fit_start", "on_fit_end", "setup", "teardown")
"""Methods of callbacks and modules whose calls are written down."""
OF_MODULES = tuple(f"on_{kind}_model_{what}" for kind in ("validation", "test") for what in ("eval", "train"))
INSIDE_STEPS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def listening(calls: list[str], word: str, base: type, names: Sequence[str] = CALLS) -> type:
    """A subclass of `base` that appends "word name" to `calls` at each call of its methods `names`."""

    def method(name: str) -> Any:
        def write_down(self: Any, *arguments: Any, **more: Any) -> Any:
            calls.append(f"{word} {name}")

        return write_down

    return type(f"Listening{word}", (base,), {name: method(name) for name in names})
