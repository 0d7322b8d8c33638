"""Tensors of single steps in files, traces of routing, and faults that are injected on purpose."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.declarations.config_fields import flag, too_small

KINDS = ("params", "wgrads", "dgrads", "activations", "tokens_per_expert")
"""What the files of single steps contain."""

FAULTS = ("exception", "hang", "lock_gil", "crash", "segfault", "sigint", "sigterm", "sigkill", "sigstop")
"""Faults that can be injected."""


@dataclass(kw_only=True, frozen=True)
class RecordsConfig:
    """Tensors of single steps, which each rank writes to safetensors files, and traces of routing.

    Files are KIND/iter_NNNNNNN/rank_NNNNN.safetensors in the folder of --save. A step that writes waits for the device.
    """

    save_params_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the weights after the update, by name. Each rank writes the weights that no rank
    before it holds."""

    save_wgrads_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the main gradients before the update, summed over ranks and not yet clipped. Each
    rank writes the gradients that no rank before it holds."""

    save_activations_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the outputs of the modules that have weights, in the first micro-batch of each
    rank."""

    save_dgrads_interval: int | None = flag(None, only_with="save")
    """Steps between two files with the gradients of the loss with respect to those outputs, in the first micro-batch
    of each rank."""

    save_tokens_per_expert_interval: int | None = flag(None, only_with=("save", "num_moe_experts"))
    """Steps between two files with the number of this rank's tokens that each router sends to each expert, summed over
    micro-batches, before tokens are dropped."""

    moe_routing_trace_path: str | None = flag(None, only_with="num_moe_experts")
    """Folder for traces of routing: rank_NNNNN.jsonl has a line for each router and micro-batch, with iteration, layer,
    and experts and weights of each token of this rank."""

    moe_routing_trace_max_training_iters: int | None = flag(None, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: number of iterations to trace; all when not given."""

    moe_routing_trace_capture_logits: bool = flag(False, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: write the router's logits too."""

    moe_routing_trace_capture_hidden_states: bool = flag(False, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: write the router's inputs too."""

    moe_routing_trace_dump_weights: bool = flag(False, only_with="moe_routing_trace_path")
    """With --moe-routing-trace-path: write the routers' weights when the run starts, to
    weights_rank_NNNNN.safetensors."""

    def interval(self, kind: str) -> int | None:
        """Returns the steps between two files of a kind; None: it is not written."""
        value: int | None = getattr(self, f"save_{kind}_interval")
        return value

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, (f"save_{kind}_interval" for kind in KINDS), 1)
        yield from too_small(self, ("moe_routing_trace_max_training_iters",), 1)


@dataclass(kw_only=True, frozen=True)
class FaultInjectorConfig:
    """Faults on purpose, to test how a cluster and its restarts react to them."""

    fault_injector_fault_types: str | None = None
    """Inject one of these faults, separated by commas. exception: the training step raises; hang: training stops and
    the process lives; lock_gil: all threads of the process stop; crash (abort), segfault, sigint, sigterm, sigkill,
    sigstop."""

    fault_injector_fault_probabilities: str | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: weights of the faults, separated by commas; equal when not given."""

    fault_injector_ranks: str | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: ranks that get the fault, separated by commas."""

    fault_injector_num_ranks: int | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: number of ranks that get the fault, chosen at random. Default: 1, without
    --fault-injector-ranks."""

    fault_injector_fault_delay: float | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: seconds until the fault."""

    fault_injector_mtti_seconds: float | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: mean time until the fault in seconds. The time is drawn from an exponential
    distribution."""

    fault_injector_offset_seconds: float | None = flag(None, only_with="fault_injector_mtti_seconds")
    """With --fault-injector-mtti-seconds: seconds that are added to the drawn time."""

    fault_injector_delay_start_iteration: int | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: iteration after which the time until the fault begins. Default: the start of
    training."""

    fault_injector_seed: int | None = flag(None, only_with="fault_injector_fault_types")
    """With --fault-injector-fault-types: seed for drawing the ranks, the fault and the time. Default: --seed."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults from which one is drawn; empty without the flag."""
        return tuple(
            word.strip().lower() for word in (self.fault_injector_fault_types or "").split(",") if word.strip()
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each fault. Raises ValueError for a word that is no number."""
        given = self.fault_injector_fault_probabilities
        return tuple(map(float, given.split(","))) if given is not None else (1.0,) * len(self.faults)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are given. Raises ValueError for a word that is no whole number."""
        given = self.fault_injector_ranks
        return tuple(map(int, given.split(","))) if given is not None else ()

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("fault_injector_num_ranks",), 1)
        seconds = ("fault_injector_fault_delay", "fault_injector_mtti_seconds", "fault_injector_offset_seconds")
        yield from too_small(self, (*seconds, "fault_injector_delay_start_iteration"), 0)
        if self.fault_injector_fault_types is None:
            return
        if unknown := [fault for fault in self.faults if fault not in FAULTS]:
            yield f"{{fault_injector_fault_types}}: {unknown[0]} is none of {', '.join(FAULTS)}"
        if (self.fault_injector_fault_delay is None) == (self.fault_injector_mtti_seconds is None):
            yield (
                "{fault_injector_fault_types}: give {fault_injector_fault_delay:name} or "
                "{fault_injector_mtti_seconds:name}"
            )
        if self.fault_injector_ranks is not None and self.fault_injector_num_ranks is not None:
            yield "{fault_injector_ranks} and {fault_injector_num_ranks} both say which ranks; give one"
        try:
            weights = self.weights
        except ValueError:
            yield "{fault_injector_fault_probabilities}: not numbers separated by commas"
        else:
            if len(weights) != len(self.faults) or min(weights, default=1.0) < 0 or not sum(weights) > 0:
                yield (
                    "{fault_injector_fault_probabilities}: give one weight for each of {fault_injector_fault_types}, "
                    "not negative and not all 0"
                )
        try:
            if min(self.ranks, default=0) < 0:
                yield "{fault_injector_ranks}: ranks count from 0"
        except ValueError:
            yield "{fault_injector_ranks}: not whole numbers separated by commas"
