"""How long to train, in which batches, and when to evaluate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, literal_text, too_small
from megatron.core.declarations.flag_grammars import ends_of, number_or_range
from megatron.core.exceptions import UserError
from megatron.training.batch_schedule import BatchSteps

SOURCES_OF_FLAGS = ("config_file", "recipe", "deepspeed_config", "accelerate_config")
"""Fields that name where other flags come from. A record of a run has those flags instead."""


@dataclass(kw_only=True, frozen=True)
class TrainingConfig:
    """Batches and iterations."""

    micro_batch_size: int
    """Sequences that one rank processes in one forward and backward pass. Required."""

    global_batch_size: int
    """Sequences of one training step, over all ranks; micro batch size x data parallel ranks when not given."""

    gradient_accumulation_steps: int | None = None
    """Micro-batches of one training step on each data parallel rank: another way to give --global-batch-size, or
    --micro-batch-size."""

    rampup_batch_size: list[int] | None = flag(None, nargs=3)
    """Start with a smaller global batch. Three numbers: first size, increment, and the number of samples over which it
    grows to --global-batch-size."""

    decrease_batch_size_if_needed: bool = False
    """Round the global batch size down to a multiple of micro batch size x data parallel ranks."""

    step_batch_size_schedule: str | None = flag(None, from_checkpoint=True)
    """Change the global batch size at given numbers of tokens: TOKENS:SIZE pairs in quotes, such as "0:384 200B:768"
    (K, M, B, T: thousands to trillions). The last size takes the place of --global-batch-size."""

    iterations_to_skip: list[int | str] = flag(default_factory=list, nargs="+", parse=number_or_range)
    """Iterations, numbered as in the log, whose data is read but not trained on, such as 300 or 100-120 (both
    included). They leave learning rate and weights unchanged."""

    train_iters: int
    """Total number of training steps, including those before a restart. This or --train-samples is required, except for
    a dry run or --skip-train."""

    train_samples: int | None = None
    """Total number of training sequences, including those before a restart. Replaces --train-iters."""

    exit_interval: int | None = None
    """Save and exit after an iteration that is a multiple of this."""

    exit_duration_in_mins: int | None = None
    """Save and exit after this many minutes."""

    manual_gc: bool = False
    """Run Python's garbage collector only at fixed steps, which are the same on all ranks."""

    manual_gc_interval: int = flag(0, only_with="manual_gc")
    """With --manual-gc: steps between two garbage collections; 0: no collections."""

    manual_gc_eval: bool = flag(
        True, off="--no-manual-gc-eval", aliases=["--disable-manual-gc-eval"], only_with="manual_gc"
    )
    """With --manual-gc: collect before and after each evaluation."""

    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        0, no_effect="buffers are allocated once and kept, so torch's allocator caches little that it could give back"
    )
    """How often to return cached GPU memory to the device."""

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""

    disable_jit_fuser: bool = flag(False, no_effect="nothing here is fused so")
    """Do not fuse operations with a just-in-time compiler."""

    optimizer_cuda_graph: bool = flag(False, no_effect="the host launches the update while the GPU still computes")
    """Replay the optimizer's step (gradient norm, clipping, update) as a CUDA graph."""

    enable_experimental: bool = flag(False, no_effect="each new feature has a flag of its own")
    """Allow experimental features."""

    sft: bool = flag(False, families=["gpt"])
    """Fine-tune on conversations: --data-path names .jsonl files with "messages", which --tokenizer-type SFTTokenizer
    encodes. Only assistants' turns are learned; conversations are packed into samples and do not see each other."""

    dry_run: bool = flag(False, from_checkpoint=False)
    """Check all flags, print parameters, tokens and memory of the run, and exit: code 0, or 2 after errors. Set the
    environment variable WORLD_SIZE to choose the number of ranks."""

    print_config: bool = flag(False, from_checkpoint=False)
    """Print every value and its source: default, flag, derived or recipe. Save the output to a file and pass it to
    --config to get the same run."""

    config_file: list[str] | None = flag(None, on="--config", nargs="+")
    """YAML or JSON files with further flags, such as num_layers: 12. Flags of the command line win; a later file wins
    over an earlier one."""

    deepspeed_config: str | None = flag(None, from_checkpoint=False, aliases=["--deepspeed_config"])
    """JSON file of DeepSpeed whose settings are taken. A flag that contradicts the file is an error. docs/frameworks.md
    says how each key is answered."""

    accelerate_config: str | None = flag(None, from_checkpoint=False, aliases=["--accelerate_config"])
    """YAML or JSON file of `accelerate config` whose settings are taken. A flag that contradicts the file is an error.
    docs/frameworks.md says how each field is answered."""

    recipe: str | None = flag(None, from_checkpoint=False)
    """Name of a published model, such as llama3-8b, whose sizes, optimizer and schedule are taken. Flags of the command
    line and of --config win. `python tools/recipes.py list` lists all."""

    layout_invariant: bool = False
    """Guarantee the same results on every layout with the same --micro-batch-size and --global-batch-size. Settings
    that break this guarantee are refused."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        sizes = ("micro_batch_size", "global_batch_size", "gradient_accumulation_steps", "train_iters", "train_samples")
        yield from too_small(self, (*sizes, "exit_interval", "exit_duration_in_mins"), 1)
        yield from too_small(self, ("manual_gc_interval",), 0)
        total, size = self.train_samples, self.global_batch_size
        if total is not None and size is not None and 0 < total < size:
            yield "{train_samples} is less than one batch of {global_batch_size}"
        yield from self._ramp_problems()
        yield from self._step_problems()
        if any(ends_of(value)[0] < 1 for value in self.iterations_to_skip):
            yield "{iterations_to_skip}: the first iteration is 1"

    def _step_problems(self) -> Iterator[str]:
        if self.step_batch_size_schedule is None:
            return
        if self.rampup_batch_size is not None:
            yield "{step_batch_size_schedule} and {rampup_batch_size:name} both set the batch size; give one"
        try:
            last = BatchSteps.parse(self.step_batch_size_schedule, 1).steps[-1][1]
        except UserError as error:
            yield f"{{step_batch_size_schedule}}: {literal_text(str(error))}"
            return
        if self.global_batch_size not in (None, last):
            yield "{global_batch_size} is not the last size of {step_batch_size_schedule}; leave it out"

    def _ramp_problems(self) -> Iterator[str]:
        if self.rampup_batch_size is None:
            return
        start, increment, samples = self.rampup_batch_size
        if min(start, increment, samples) < 1:
            yield "{rampup_batch_size}: start, increment and samples must be at least 1"
            return
        if self.global_batch_size is None:
            return
        if start >= self.global_batch_size:
            yield "{rampup_batch_size} begins at or above {global_batch_size}; begin below it"
        elif (self.global_batch_size - start) % increment:
            near = self.global_batch_size - (self.global_batch_size - start) % increment
            yield (
                f"{{rampup_batch_size}}: from {start} in steps of {increment} the batch does not reach "
                f"{{global_batch_size}}; it reaches {near} or {near + increment}"
            )


@dataclass(kw_only=True, frozen=True)
class EvaluationConfig:
    """Validation during training, and validation and test after the last step."""

    eval_interval: int | None = flag(None, only_with="eval_iters!=0", or_with="eval_tasks")
    """Steps between two validations. Without it, validation runs once, after training."""

    eval_iters: int = 100
    """Global batches of one evaluation; 0: never evaluate."""

    skip_train: bool = False
    """Evaluate once and exit without training."""

    eval_tasks: str | None = None
    """YAML or JSON file of tasks that each evaluation scores: perplexity of texts, multiple choice, cloze, exact match
    (docs/evaluation.md)."""

    start_eval_at_iter: int | None = flag(None, only_with="eval_interval")
    """With --eval-interval: first iteration after which validation may run."""

    eval_fresh_samples: bool = flag(False, only_with="eval_iters!=0")
    """Read other validation samples in each evaluation, as Megatron-LM does. Without it all evaluations read the same
    samples, so that their losses can be compared."""

    full_validation: bool = flag(False, families=["gpt"], only_with="eval_iters!=0")
    """Evaluate on the whole validation data each time; --eval-iters then applies to the test data only."""

    multiple_validation_sets: bool = flag(False, only_with="eval_iters!=0")
    """Evaluate each validation data set separately, on --eval-iters global batches, and report a loss for each. The
    data sets are those of --valid-data-path, or of --data-path after --split, and have no weights."""

    validation_set_names: list[str] | None = flag(
        None, nargs="+", only_with="multiple_validation_sets", from_checkpoint=True
    )
    """With --multiple-validation-sets: names of the sets in the log, such as validation-wiki; numbers from 0 when not
    given."""

    eval_global_batch_size: int | None = flag(None, only_with="eval_iters!=0")
    """Global batch size of evaluation; --global-batch-size when not given."""

    eval_micro_batch_size: int | None = flag(None, only_with="eval_iters!=0", or_with="eval_tasks")
    """Micro-batch size of evaluation; --micro-batch-size when not given."""

    def global_batch_size(self, training: TrainingConfig) -> int:
        """Returns the number of samples in a global batch of evaluation."""
        return self.eval_global_batch_size or training.global_batch_size

    def micro_batch_size(self, training: TrainingConfig) -> int:
        """Returns the number of samples in a micro-batch of evaluation."""
        return self.eval_micro_batch_size or training.micro_batch_size

    def num_microbatches(self, training: TrainingConfig, data_parallel_size: int) -> int:
        """Returns the number of micro-batches in a global batch of evaluation, on each data parallel rank."""
        return self.global_batch_size(training) // (self.micro_batch_size(training) * data_parallel_size)

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        sizes = ("eval_global_batch_size", "eval_micro_batch_size")
        yield from too_small(self, ("eval_interval", "start_eval_at_iter", *sizes), 1)
        yield from too_small(self, ("eval_iters",), 0)
        if self.skip_train and self.eval_iters == 0 and self.eval_tasks is None:
            yield "{skip_train} with {eval_iters} leaves nothing to do"
        names = self.validation_set_names or []
        if len(set(names)) < len(names):
            yield "{validation_set_names}: two sets have the same name"
