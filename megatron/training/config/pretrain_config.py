"""The complete, checked and frozen settings of a run."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.core.adapters.config import LoraConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.groups.rank_grid import DEFAULT_ORDER, RankGrid
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.hardware import HardwareConfig
from megatron.training.config.log import LoggingConfig, RecordsConfig
from megatron.training.config.model import ModelConfig
from megatron.training.config.parallel import ParallelConfig
from megatron.training.config.resilience import FaultInjectorConfig, ResilienceConfig
from megatron.training.config.schedule import ScheduleConfig
from megatron.training.config.settings import Source
from megatron.training.config.training import EvaluationConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """The settings of a run. `megatron.training.arguments` builds it; after that, nothing reads the command line."""

    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    model: ModelConfig
    parallel: ParallelConfig
    hardware: HardwareConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    adapters: LoraConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    resilience: ResilienceConfig
    records: RecordsConfig
    fault_injector: FaultInjectorConfig
    provenance: Mapping[str, Source]
    """Source of each value, by field name."""
    notes: tuple[str, ...] = ()
    """Lines to print once at the start: flags that are read differently from how they are written, and flags without
    effect."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of the arguments that a user's script added."""

    @property
    def transformer(self) -> TransformerConfig:
        """Config of the transformer layers."""
        return self.model.transformer

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.parallel.world_size

    @property
    def seed(self) -> int:
        """Seed of initial weights, dropout and data order."""
        return self.transformer.seed

    @property
    def decoder_seq_length(self) -> int | None:
        """Tokens of the decoder's part of a sample; None for a model without encoder."""
        return self.data.decoder_seq_length if self.transformer.num_encoder_layers else None

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to both sides: the run trains a BERT."""
        return self.model.model_family == "bert"

    @cached_property
    def grid(self) -> RankGrid:
        """The grid of ranks."""
        transformer = self.transformer
        return RankGrid(
            self.world_size,
            tensor=transformer.tensor_model_parallel_size,
            context=transformer.context_parallel_size,
            pipeline=transformer.pipeline_model_parallel_size,
            expert=transformer.expert_model_parallel_size,
            expert_tensor=transformer.expert_tensor_parallel_size if transformer.num_moe_experts else None,
            order="tp-cp-ep-pp-dp" if self.parallel.use_tp_pp_dp_mapping else DEFAULT_ORDER,
            optimizer_instances=self.ddp.num_distributed_optimizer_instances,
        )

    def parts(self) -> list[Any]:
        """Returns the config objects. If two have a field with the same name, its flag belongs to the first."""
        return [self.transformer, *(getattr(self, name) for name in config_classes())]

    def flat(self) -> dict[str, Any]:
        """Returns all values by field name."""
        values: dict[str, Any] = {}
        for part in self.parts():
            for field in dataclasses.fields(part):
                values.setdefault(field.name, getattr(part, field.name))
        values.pop("transformer")
        return values


def config_classes() -> dict[str, type[Any]]:
    """Returns the config dataclasses of a run by the name of their field, without the transformer's."""
    types = ((field.name, field.type) for field in dataclasses.fields(PretrainConfig))
    return {name: kind for name, kind in types if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")}
