"""`MegatronStrategy`: the layout of a run and its checkpoints, with the arguments that NeMo 2.3 to 2.5 publish."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, Foreign, shown
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.launcher import RunLauncher
from megatron.facades.nemo.lightning.ranks import RankFacts, agreed, gathered, of_rank, reduced, wait_for_all

if TYPE_CHECKING:
    from megatron.facades.nemo.lightning.megatron_parallel import MegatronParallel

_ONE_PLAN = "ranks always share writing and reading, and a checkpoint's plan is computed without communication"
_ENCODER = "leave it out; an encoder takes part in the tensor and pipeline parallel sizes of the model"

ARGUMENTS: Sequence[Argument] = (
    Argument("tensor_model_parallel_size", 1, "tensor_model_parallel_size"),
    Argument("pipeline_model_parallel_size", 1, "pipeline_model_parallel_size"),
    Argument(
        "pipeline_model_parallel_comm_backend",
        note="pipeline stages use the communication library of all other groups",
    ),
    Argument("num_layers_in_first_pipeline_stage", None, "num_layers_in_first_pipeline_stage"),
    Argument("num_layers_in_last_pipeline_stage", None, "num_layers_in_last_pipeline_stage"),
    Argument("virtual_pipeline_model_parallel_size", None, "num_virtual_stages_per_pipeline_rank"),
    Argument("microbatch_group_size_per_vp_stage", None, "microbatch_group_size_per_vp_stage"),
    Argument("context_parallel_size", 1, "context_parallel_size"),
    Argument("sequence_parallel", False, "sequence_parallel"),
    Argument("expert_model_parallel_size", 1, "expert_model_parallel_size"),
    Argument("moe_extended_tp", False, refusal="give expert_tensor_parallel_size, which has replaced it"),
    Argument("expert_tensor_parallel_size", None, "expert_tensor_parallel_size"),
    Argument("encoder_tensor_model_parallel_size", 0, refusal=_ENCODER),
    Argument("encoder_pipeline_model_parallel_size", 0, refusal=_ENCODER),
    Argument("account_for_embedding_in_pipeline_split", False, "account_for_embedding_in_pipeline_split"),
    Argument("account_for_loss_in_pipeline_split", False, "account_for_loss_in_pipeline_split"),
    Argument("data_sampler"),
    Argument("parallel_devices"),  # Lightning's Trainer sets both; the launcher's variables decide
    Argument("cluster_environment"),
    Argument("checkpoint_io"),
    Argument("find_unused_parameters", False, note="a parameter without a gradient keeps a gradient of zero"),
    Argument("ckpt_load_optimizer", True),
    Argument("ckpt_save_optimizer", True),
    Argument("ckpt_load_main_params", False, note="main weights are always read together with the weights"),
    Argument("ddp", "megatron"),
    Argument("fsdp"),
    Argument("lazy_init", False, note="nothing is loaded when a model is built"),
    Argument("pipeline_dtype"),
    Argument(
        "use_te_rng_tracker",
        False,
        note="random numbers are functions of seed, step and position; there are no generator states",
    ),
    Argument(
        "use_sharp",
        False,
        refusal="leave it out; NCCL uses SHARP where the network has it if NCCL_COLLNET_ENABLE is 1",
    ),
    Argument("save_ckpt_format", "torch_dist", note="checkpoints are safetensors and JSON; any layout loads any other"),
    Argument("ckpt_async_save", True),
    Argument("ckpt_torch_dist_multiproc", note=_ONE_PLAN),
    Argument("ckpt_assume_constant_structure", False, note=_ONE_PLAN),
    Argument("ckpt_parallel_save", True, note=_ONE_PLAN),
    Argument("ckpt_parallel_save_within_dp", False, note=_ONE_PLAN),
    Argument("ckpt_parallel_load", True, note=_ONE_PLAN),
    Argument("ckpt_parallel_save_optim", True, note=_ONE_PLAN),
    Argument("ckpt_load_directly_on_device", True, note="tensors are read into the place where they stay"),
    Argument("ckpt_load_strictness"),
    Argument("setup_optimizers", True, refusal="leave it out; fit builds the optimizer, validate and test need none"),
    Argument("init_model_parallel", True, refusal="leave it out; the run makes the process groups"),
    Argument("replace_progress_bar", True, note="the run prints a log line every log_every_n_steps steps"),
    Argument("progress_interval", 1, note="the run prints a log line every log_every_n_steps steps"),
    Argument("restore_config"),
    Argument("megatron_log_level", 0),
    Argument("use_tp_pp_dp_mapping", False, "use_tp_pp_dp_mapping"),
    Argument("num_distributed_optimizer_instances", 1, "num_distributed_optimizer_instances"),
    Argument("nccl_communicator_config_path", None, "nccl_communicator_config_path"),
    Argument("pipeline_model_parallel_layout", None, "pipeline_model_parallel_layout"),
    Argument(
        "use_gloo_process_groups",
        True,
        note="there is always one small gloo group, with which ranks agree when to exit",
    ),
    Argument("flags", ()),
)
"""NeMo's arguments in its order, and `flags`: words of this package's command line, which win over everything else."""

_WITHOUT_EFFECT = {
    "gradient_as_bucket_view": "gradients always lie in buckets",
}
"""Keywords that NeMo passes on to Lightning's DDPStrategy."""
_FSDP = {"megatron": "optim_grads_params"}


class MegatronStrategy(ArgumentValues, RankFacts):
    """How a run is divided over its ranks. Lightning's own Trainer takes it too: it then starts the same run.

    `flags` is an addition of this package: further flags, such as ["--log-throughput"].
    """

    table = ARGUMENTS
    takes_more = True
    lightning_class = "strategies", "Strategy"
    data_sampler: Foreign
    ddp: object
    fsdp: object
    pipeline_dtype: object
    restore_config: Foreign
    checkpoint_io: object
    ckpt_load_optimizer: bool
    ckpt_save_optimizer: bool
    ckpt_async_save: bool
    ckpt_load_strictness: object
    megatron_log_level: int
    flags: Sequence[str]
    megatron_parallel: "MegatronParallel | None" = None
    """The model chunks of this rank while a run lasts."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        lightning = [cls for cls in type(self).__mro__ if cls.__module__.startswith("lightning.")]
        if lightning:
            lightning[0].__init__(self)  # type: ignore[misc]
        self._launcher = RunLauncher()

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of the layout and of checkpoints."""
        for name, reason in _WITHOUT_EFFECT.items():
            if self.own_keywords.pop(name, None) is not None:
                flags.note(f"MegatronStrategy({name}=...) has no effect: {reason}")
        older = self.own_keywords.pop("ckpt_include_optimizer", self.ckpt_save_optimizer)
        self.ckpt_save_optimizer = self.ckpt_save_optimizer and bool(older)
        super().give_flags(flags)
        if type(self.checkpoint_io).__name__ not in ("NoneType", "TorchCheckpointIO"):  # the latter is Lightning's own
            advice = "leave it out; checkpoints are written as docs/checkpoints.md describes"
            flags.refuse(f"MegatronStrategy(checkpoint_io={shown(self.checkpoint_io)})", advice)
        flags.give("no_load_optim", not self.ckpt_load_optimizer)
        flags.give("no_save_optim", not self.ckpt_save_optimizer)
        if self.ckpt_load_strictness is not None:
            flags.give("dist_ckpt_strictness", getattr(self.ckpt_load_strictness, "value", self.ckpt_load_strictness))
        if self.megatron_log_level:
            flags.give("logging_level", self.megatron_log_level)
        self._give_data_parallel(flags)
        if self.restore_config is not None:
            self.restore_config.give_flags(flags)

    def _give_data_parallel(self, flags: Flags) -> None:
        if isinstance(self.ddp, DistributedDataParallelConfig):
            skip = ("check_for_nan_in_grad", "use_custom_fsdp", "preserve_fp32_weights")
            flags.give_fields(self.ddp, DistributedDataParallelConfig, skip)
            if self.ddp.use_custom_fsdp:
                flags.give("use_megatron_fsdp", True)
        elif self.ddp != "megatron":
            what = f"MegatronStrategy(ddp={shown(self.ddp)})"
            flags.refuse(what, 'give "megatron" or a DistributedDataParallelConfig of megatron.core.distributed')
        if self.fsdp == "megatron":
            flags.give("use_megatron_fsdp", True)
            if not isinstance(self.ddp, DistributedDataParallelConfig):
                flags.give("data_parallel_sharding_strategy", _FSDP["megatron"])
        elif self.fsdp is not None:
            flags.refuse(f"MegatronStrategy(fsdp={shown(self.fsdp)})", 'give "megatron", which shards the same state')

    def check_pipeline_dtype(self, flags: Flags, dtype: torch.dtype) -> None:
        """Adds a problem if pipeline stages shall exchange another type than that of the model."""
        if self.pipeline_dtype not in (None, dtype):
            what = f"MegatronStrategy(pipeline_dtype={self.pipeline_dtype})"
            flags.refuse(what, f"leave it out; stages exchange activations in the type of the model, {dtype}")

    # What Lightning's Trainer asks of a strategy. The run of this package does the rest.

    @property
    def root_device(self) -> torch.device:
        """The device of this process as Lightning knows it before the run starts."""
        return torch.device("cpu")

    def model_to_device(self) -> None:
        """Does nothing: the run moves the model."""

    def all_gather(self, tensor: torch.Tensor, group: Foreign = None, sync_grads: bool = False) -> torch.Tensor:
        """Returns the tensors of all ranks: [ranks, ...]."""
        return gathered(tensor)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        wait_for_all()

    def broadcast(self, obj: Foreign, src: int = 0) -> Foreign:
        """Returns a tensor, number or text of rank `src`."""
        return of_rank(obj, src)

    def reduce(self, tensor: torch.Tensor, group: Foreign = None, reduce_op: object = "mean") -> torch.Tensor:
        """Returns the mean (or "sum") of a tensor over all ranks."""
        return reduced(tensor, str(reduce_op))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all ranks, or any rank, decided so."""
        return agreed(decision, all)
