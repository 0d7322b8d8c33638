"""Memory and time of a layout from the config of the run, as --dry-run computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.diagnosis.memory.peak import peaks_of_ranks
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.layouts import Layout
from megatron.diagnosis.planning.ranking import ExactTime
from megatron.diagnosis.planning.settings_of_run import Setting, layout_settings, words_of
from megatron.diagnosis.planning.step_time import step_time
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment


@dataclass(frozen=True)
class PlannedRun:
    """A run whose layout is still open. Its data and tokenizer need not exist."""

    settings: Sequence[Setting]
    """All settings but those of layout, tokenizer and data."""
    vocab_size: int
    model_family: str
    cluster: Cluster

    def config(self, layout: Layout) -> PretrainConfig:
        """Returns the config of the run with this layout. Raises UserError if the run would refuse it."""
        words = words_of([*self.settings, *layout_settings(layout, {"": ""})])
        words += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(self.vocab_size - 1)]
        defaults = {"model_family": "gpt" if self.model_family == "mamba" else self.model_family}
        if self.model_family == "mamba":
            defaults["is_hybrid_model"] = True
        environment = LaunchEnvironment(self.cluster.gpus, True, ranks_of_host=self.cluster.gpus_per_node)
        return configure(words, None, defaults, launch_environment=environment)


@dataclass(frozen=True)
class ExactCosts:
    """Computes the costs of layouts of a run. Raises UserError if the run would refuse a layout, or if a time has no
    measurement or data sheet to rest on."""

    run: PlannedRun

    def time(self, layout: Layout) -> ExactTime:
        """Returns the time of a step."""
        step = step_time(self.run.config(layout), self.run.cluster)
        mfu = step.mfu.value if step.mfu is not None else 0.0
        return ExactTime(step.seconds.value, mfu, step.seconds.error, step.bubble)

    def memory(self, layout: Layout) -> int:
        """Returns the bytes of the rank that needs most: of the first stages, which keep most micro-batches, or of the
        last, which has the head."""
        ranks = {0, 1, layout.pipeline - 1}
        peaks = peaks_of_ranks(self.run.config(layout), pipeline_ranks=ranks)
        return max(peak.allocated + peak.context for peak in peaks)
