"""NeMo's callbacks that ask for something that the run does itself: each becomes flags, and is never called."""

import signal
from collections.abc import Sequence

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues
from megatron.facades.nemo.lightning.flags import Flags

_LOGGED = "the log line has the time of a step, and its throughput"


class RunCallback(ArgumentValues):
    """Its arguments are settings of the run."""

    lightning_class = "callbacks", "Callback"
    switches: Sequence[str] = ()
    """Flags that the callback switches on."""

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings that the callback stands for."""
        for field in self.switches:
            flags.give(field, True)
        super().give_flags(flags)


class TimingCallback(RunCallback):
    """Logs the time of steps, as every run does."""

    table = (Argument("log_tokens_per_sec", False, note=_LOGGED), Argument("timer_kwargs"))


class FLOPsMeasurementCallback(RunCallback):
    """Logs the throughput."""

    switches = ("log_throughput",)
    table = (Argument("model_config"), Argument("data_config"), Argument("model_name"))


class GarbageCollectionCallback(RunCallback):
    """Collects garbage on all ranks at once, every so many steps."""

    switches = ("manual_gc",)
    table = (
        Argument("gc_interval_train", None, "manual_gc_interval"),
        Argument("gc_interval_val", note="garbage is collected before an evaluation"),
    )


class NsysCallback(RunCallback):
    """Profiles steps for Nsight Systems."""

    switches = ("profile",)
    table = (
        Argument("start_step", 10, "profile_step_start"),
        Argument("end_step", 12, "profile_step_end"),
        Argument("ranks", None, "profile_ranks"),
        Argument("gen_shape", False, "record_shapes"),
    )


class PreemptionCallback(RunCallback):
    """Saves and ends the run after a signal."""

    switches = ("exit_signal_handler",)
    table = (Argument("device"), Argument("sig"))
    sig: signal.Signals | None

    def give_flags(self, flags: Flags) -> None:
        """Adds the signal, SIGTERM by default."""
        super().give_flags(flags)
        flags.give("exit_signal", self.sig or signal.SIGTERM)


class DDPParityChecker(RunCallback):
    """Compares the weights of data parallel ranks, every so many steps."""

    table = (Argument("interval", 100, "check_weight_hash_across_dp_replicas_interval"),)


class MegatronCommOverlapCallback(RunCallback):
    """Overlaps communication with computation. None leaves a setting as it is by default."""

    table = (
        Argument("tp_comm_overlap", None, "tp_comm_overlap"),
        Argument("tp_comm_overlap_cfg", refusal="leave it out; --tp-comm-overlap-cfg names a file"),
        Argument("tp_comm_bootstrap_backend", None, "tp_comm_bootstrap_backend"),
        Argument("overlap_p2p_comm", None, "overlap_p2p_comm"),
        Argument("batch_p2p_comm", note="follows from the schedule"),
        Argument("overlap_grad_reduce", None, "overlap_grad_reduce"),
        Argument("overlap_param_gather", None, "overlap_param_gather"),
        Argument("overlap_param_gather_with_optimizer_step", None, "overlap_param_gather_with_optimizer_step"),
        Argument("align_param_gather", None, "align_param_gather"),
        Argument("bucket_size", None, "bucket_size"),
        Argument("defer_embedding_wgrad_compute", None, "defer_embedding_wgrad_compute"),
        Argument("wgrad_deferral_limit", None, "wgrad_deferral_limit"),
    )


class MegatronProgressBar(RunCallback):
    """Nothing: the run prints a log line every log_every_n_steps steps."""
