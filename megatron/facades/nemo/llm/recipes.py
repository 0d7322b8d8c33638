"""NeMo's recipes of pretraining: `llm.llama3_8b.pretrain_recipe(...)`, a run.Partial that a script changes and runs.

Sizes and learning rates are those of this package's recipes. The layout is that of the arguments, by default one rank
for each copy of the model: NeMo's is meant for certain GPUs, and no layout changes the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.optimizer import OptimizerConfig
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import run
from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.run_callbacks import (
    GarbageCollectionCallback,
    MegatronCommOverlapCallback,
    TimingCallback,
)
from megatron.facades.nemo.llm.api import pretrain
from megatron.facades.nemo.llm.config import OF_RECIPES, config_of_recipe
from megatron.facades.nemo.llm.data import MockDataModule
from megatron.facades.nemo.llm.gpt import GPTModel
from megatron.training.config.recipes.catalogue import recipe_named

_FAMILIES = {"GPT": "gpt3", "MistralNeMo": "mistral_nemo"}


def bf16_mixed() -> run.Config:
    """Returns the plugin for training in bfloat16."""
    return run.Config(nl.MegatronMixedPrecision, precision="bf16-mixed")


def bf16_with_fp8_mixed() -> run.Config:
    """Returns the plugin for training in fp8, with the delayed recipe."""
    fp8 = {"fp8": "hybrid", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "fp8_param_gather": True}
    return run.Config(nl.MegatronMixedPrecision, precision="bf16-mixed", **fp8)


def distributed_fused_adam_with_cosine_annealing(
    precision: str = "bf16-mixed",
    warmup_steps: int = 2000,
    constant_steps: int = 0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    max_lr: float = 1e-4,
    min_lr: float | None = None,
    clip_grad: float = 1.0,
) -> run.Config:
    """Returns AdamW with sharded state, and a cosine from `max_lr` down to `min_lr`, by default a tenth of it."""
    config = run.Config(
        OptimizerConfig,
        optimizer="adam",
        lr=max_lr,
        weight_decay=0.1,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=1e-5,
        use_distributed_optimizer=True,
        clip_grad=clip_grad,
    )
    schedule = run.Config(
        nl.lr_scheduler.CosineAnnealingScheduler,
        warmup_steps=warmup_steps,
        constant_steps=constant_steps,
        min_lr=0.1 * max_lr if min_lr is None else min_lr,
    )
    return run.Config(nl.MegatronOptimizerModule, config=config, lr_scheduler=schedule)


def default_log(dir: str | None = None, name: str = "default", every_n_train_steps: int = 2000) -> run.Config:
    """Returns the folder of a run, where it saves a checkpoint every so many steps."""
    checkpoint = run.Config(nl.ModelCheckpoint, save_last=True, save_top_k=10, every_n_train_steps=every_n_train_steps)
    return run.Config(nl.NeMoLogger, ckpt=checkpoint, name=name, log_dir=dir)


def default_resume(resume_if_exists: bool = True, resume_ignore_no_checkpoint: bool = True) -> run.Config:
    """Returns the object that makes a run continue from its checkpoints."""
    how = {"resume_if_exists": resume_if_exists, "resume_ignore_no_checkpoint": resume_ignore_no_checkpoint}
    return run.Config(nl.AutoResume, **how)


@dataclass(frozen=True)
class Recipe:
    """A recipe under NeMo's name of its module, such as `llm.llama3_8b`."""

    config: str
    """The class of sizes, such as Llama3Config8B."""

    def model(self) -> run.Config:
        """Returns the model."""
        return run.Config(GPTModel, config=run.Config(config_of_recipe(self.config)))

    def pretrain_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int = 1,
        num_gpus_per_node: int = 8,
        *,
        tensor_parallelism: int = 1,
        pipeline_parallelism: int = 1,
        pipeline_parallelism_type: object = None,
        virtual_pipeline_parallelism: int | None = None,
        context_parallelism: int = 1,
        sequence_parallelism: bool = False,
        expert_parallelism: int = 1,
        max_steps: int = 300000,
        precision: str = "bf16-mixed",
        gradient_clip_val: float = 1.0,
        val_check_interval: int = 2000,
        global_batch_size: int = 512,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        warmup_steps: int = 2000,
        constant_steps: int = 0,
        min_lr: float | None = None,
        max_lr: float | None = None,
        performance_mode: bool = False,
        fn: Callable[..., object] = pretrain,
        **of_trainer: object,
    ) -> run.Partial:
        """Returns `llm.pretrain` with a model, a trainer, made-up data, an optimizer, folders below `dir` and resuming.
        Sequence length and learning rate are by default those of the published model. `performance_mode` overlaps
        communication, and collects garbage on all ranks at once. `of_trainer`: more arguments of nl.Trainer, such as
        limit_val_batches."""
        published: Mapping[str, Foreign] = recipe_named(OF_RECIPES[self.config][1]).flags
        strategy = run.Config(
            nl.MegatronStrategy,
            tensor_model_parallel_size=tensor_parallelism,
            pipeline_model_parallel_size=pipeline_parallelism,
            pipeline_dtype=pipeline_parallelism_type,
            virtual_pipeline_model_parallel_size=virtual_pipeline_parallelism,
            context_parallel_size=context_parallelism,
            sequence_parallel=sequence_parallelism,
            expert_model_parallel_size=expert_parallelism,
            ddp=run.Config(DistributedDataParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
        )
        callbacks: list[object] = [run.Config(TimingCallback)]
        if performance_mode:
            callbacks += [
                run.Config(MegatronCommOverlapCallback, tp_comm_overlap=sequence_parallelism),
                run.Config(GarbageCollectionCallback, 100, 100),
            ]
        trainer = run.Config(
            nl.Trainer,
            accelerator="auto",
            strategy=strategy,
            devices=num_gpus_per_node,
            num_nodes=num_nodes,
            plugins=run.Config(nl.MegatronMixedPrecision, precision=precision),
            callbacks=callbacks,
            max_steps=max_steps,
            val_check_interval=val_check_interval,
            **{"limit_test_batches": 32, "limit_val_batches": 32, "log_every_n_steps": 10, **of_trainer},
        )
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        return run.Partial(
            fn,
            model=self.model(),
            trainer=trainer,
            data=run.Config(MockDataModule, seq_length=seq_length or published["seq_length"], **sizes),
            log=default_log(dir, name, val_check_interval),
            optim=distributed_fused_adam_with_cosine_annealing(
                precision,
                warmup_steps,
                constant_steps,
                max_lr=published["lr"] if max_lr is None else max_lr,
                min_lr=min_lr,
                clip_grad=gradient_clip_val,
            ),
            resume=default_resume(),
        )

    def finetune_recipe(self, *arguments: object, **more: object) -> NoReturn:
        """Raises UserError."""
        raise UserError("finetune_recipe: recipes of fine-tuning are not here; --lora-rank trains adapters")


def _name(config: str) -> str:
    family, size = config.split("Config")
    return f"{_FAMILIES.get(family, family.lower())}_{size.lower()}"


RECIPES = {_name(config): Recipe(config) for config in OF_RECIPES}
"""NeMo's modules of recipes by name: llama3_8b, mixtral_8x7b and others."""


def __getattr__(name: str) -> Foreign:
    """Returns a recipe by name."""
    if name not in RECIPES:
        raise AttributeError(f"{name}: the recipes are {', '.join(RECIPES)}")
    return RECIPES[name]
