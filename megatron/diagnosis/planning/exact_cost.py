"""Memory and time of a layout from the config of the run, as --dry-run computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.layouts import Layout
from megatron.diagnosis.planning.ranking import ExactCost
from megatron.diagnosis.planning.rough_cost import RoughCost
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


class ExactCosts:
    """Computes the costs of layouts of a run."""

    def __init__(self, run: PlannedRun, rough: RoughCost) -> None:
        self._run, self._rough = run, rough

    def __call__(self, layout: Layout) -> ExactCost:
        """Returns memory and time. Raises UserError if the run would refuse the layout, or if a time has no basis."""
        config = self._run.config(layout)
        step = step_time(config, self._run.cluster)
        mfu = step.mfu.value if step.mfu is not None else 0.0
        return ExactCost(int(self._rough.memory(layout)), step.seconds.value, mfu, step.seconds.error, step.bubble)
