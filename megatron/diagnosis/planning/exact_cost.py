"""Memory and time of a layout from the config of the run, as --dry-run computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.data.tokenizer.build import padded_vocab_size
from megatron.diagnosis.memory.peak import peaks_of_ranks
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.layouts import Layout
from megatron.diagnosis.planning.ranking import ExactTime
from megatron.diagnosis.planning.settings_of_run import Setting, layout_settings, words_of
from megatron.diagnosis.planning.step_time import step_time
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.setup.set_up import resolve_auto_layout


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
        defaults: dict[str, str | bool] = {"model_family": "gpt" if self.model_family == "mamba" else self.model_family}
        if self.model_family == "mamba":
            defaults["is_hybrid_model"] = True
        environment = LaunchEnvironment(self.cluster.gpus, True, ranks_of_host=self.cluster.gpus_per_node)
        return configure(words, None, defaults, launch_environment=environment)

    def with_stages(self, layout: Layout) -> tuple[PretrainConfig, Sequence[str]]:
        """Returns the config with stages in place of the layout auto, and notes about them."""
        config = self.config(layout)
        rows = padded_vocab_size(self.vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor)
        return resolve_auto_layout(config, rows)

    def time(self, layout: Layout) -> ExactTime:
        """Returns the time of a step. Raises UserError if the run would refuse the layout, or if a time has no
        measurement or data sheet to rest on."""
        step = step_time(self.config(layout), self.cluster)
        mfu = step.mfu.value if step.mfu is not None else 0.0
        return ExactTime(step.seconds.value, mfu, step.seconds.error, step.bubble)

    def memory(self, layout: Layout) -> int:
        """Returns the bytes of the pipeline rank that needs most: the one that keeps most layers of micro-batches, or
        the last, which has the head. Raises UserError if the run would refuse the layout."""
        config, _ = self.with_stages(layout)
        ranks = {_fullest(config, layout), layout.pipeline - 1}
        peaks = peaks_of_ranks(config, pipeline_ranks=ranks)
        return max(peak.allocated + peak.context for peak in peaks)


def _fullest(config: PretrainConfig, layout: Layout) -> int:
    """Returns the pipeline rank that keeps most layers times micro-batches: of p ranks, rank r keeps p - r, or with v
    chunks p (v - 1) + 2 (p - r) - 1 of them (arXiv:2104.04473, section 2.2)."""
    stages, size, chunks = stage_map(config.transformer), layout.pipeline, layout.virtual

    def kept(rank: int) -> float:
        layers = sum(len(stages.stage_at(rank, chunk).layers) for chunk in range(stages.chunks))
        alive = size - rank if chunks == 1 else (size * (chunks - 1) + 2 * (size - rank) - 1) / chunks
        return layers * alive

    return max(range(size), key=kept)
