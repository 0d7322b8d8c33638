"""NeMo's lightning package: `from megatron.facades.nemo import lightning as nl`."""

from megatron.facades.nemo.lightning import io as io
from megatron.facades.nemo.lightning import lr_scheduler as lr_scheduler
from megatron.facades.nemo.lightning.bases import base_class
from megatron.facades.nemo.lightning.data import MegatronDataSampler as MegatronDataSampler
from megatron.facades.nemo.lightning.folders import AutoResume as AutoResume
from megatron.facades.nemo.lightning.folders import ModelCheckpoint as ModelCheckpoint
from megatron.facades.nemo.lightning.folders import NeMoLogger as NeMoLogger
from megatron.facades.nemo.lightning.folders import RestoreConfig as RestoreConfig
from megatron.facades.nemo.lightning.loss import MaskedTokenLossReduction as MaskedTokenLossReduction
from megatron.facades.nemo.lightning.loss import MegatronLossReduction as MegatronLossReduction
from megatron.facades.nemo.lightning.lr_scheduler import LRSchedulerModule as LRSchedulerModule
from megatron.facades.nemo.lightning.megatron_parallel import CallbackConnector as CallbackConnector
from megatron.facades.nemo.lightning.megatron_parallel import MegatronParallel as MegatronParallel
from megatron.facades.nemo.lightning.optim import MegatronOptimizerModule as MegatronOptimizerModule
from megatron.facades.nemo.lightning.precision import MegatronMixedPrecision as MegatronMixedPrecision
from megatron.facades.nemo.lightning.strategy import MegatronStrategy as MegatronStrategy
from megatron.facades.nemo.lightning.trainer import Trainer as Trainer

__getattr__ = base_class
