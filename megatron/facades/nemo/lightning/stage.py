"""Runs a stage of a trainer (fit, validate or test): turns its objects into the settings and providers of a run."""

import copy
import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.keywords import Keywords
from megatron.facades import parallel_state
from megatron.facades.nemo.lightning.arguments import ArgumentValues, Foreign
from megatron.facades.nemo.lightning.bases import defines
from megatron.facades.nemo.lightning.callbacks import Listeners, Metrics, StageHook, keep_logged, weighted, with_logged
from megatron.facades.nemo.lightning.data import StageData
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.folders import give_ckpt_path
from megatron.facades.nemo.lightning.megatron_parallel import CallbackConnector, MegatronParallel, network_of
from megatron.facades.nemo.lightning.model_flags import give_model
from megatron.facades.nemo.lightning.module_steps import Kind, functions_of
from megatron.facades.nemo.lightning.trainer_flags import give_trainer
from megatron.facades.pretrain import pretrain_config
from megatron.facades.utils import unwrap_model
from megatron.training.arguments import take_ranks
from megatron.training.hooks.exit import ExitDecision
from megatron.training.hooks.hook import Hook
from megatron.training.launch.errors import exit_with_error_of_rank, exit_with_problems
from megatron.training.providers import Context, ForwardStep, LossFunction, Providers, Stage

KIND_OF_STAGE: Mapping[str, Kind] = {"fit": "validation", "validate": "validation", "test": "test"}
"""The kind of step of a stage's evaluations."""


@dataclass(frozen=True)
class Request:
    """What fit, validate or test was asked for."""

    stage: str
    module: nn.Module
    datamodule: Foreign
    loaders: Mapping[str, Foreign]
    ckpt_path: str | None = None


def run_stage(trainer: Foreign, request: Request) -> list[dict[str, float]] | None:
    """Runs a stage. Returns the metrics of validate and test, None after fit. Raises one UserError that names all
    arguments that do not work; raises SystemExit if the run ends early with an exit code, as `pretrain` does."""
    started = time.monotonic()
    take_ranks()
    given = [loader for loader in request.loaders.values() if hasattr(loader, "setup")]  # a data module by position
    if given and request.datamodule is None:
        request = dataclasses.replace(request, datamodule=given[0], loaders={})
    if request.stage not in KIND_OF_STAGE:
        raise UserError(f"trainer.{request.stage}: not yet; fit, validate and test work")
    if not isinstance(trainer.strategy, ArgumentValues):
        raise UserError(f"nl.Trainer(strategy=<{type(trainer.strategy).__name__}>): give an nl.MegatronStrategy(...)")
    parts = StageParts(trainer, request)
    launched = "RANK" in os.environ
    try:
        config = parts.configure()
    except UserError as error:
        if launched:  # the message once, and no traceback of each rank
            exit_with_problems(error)
        raise
    try:
        decision = parts.run(config, started)
    except UserError as error:
        if launched:
            exit_with_error_of_rank(error)
        raise
    if decision is not None and decision.exit_code:
        raise SystemExit(decision.exit_code)
    if request.stage == "fit":
        return None
    name = "test_loss" if request.stage == "test" else "val_loss"
    return [{key: float(value) for key, value in trainer.callback_metrics.items() if key == name}]


class StageParts:
    """The objects of a stage, and the providers that they make."""

    def __init__(self, trainer: Foreign, request: Request) -> None:
        self.trainer, self.request, self.stage = trainer, request, request.stage
        self.module = request.module
        self.modules: dict[int, nn.Module] = {}
        """The module of each chunk, by the identity of its network."""
        self.data = StageData(request.stage, request.datamodule, request.loaders)
        self.listeners = Listeners(trainer, self.module, request.datamodule, callbacks_of(trainer, self.module))
        self.metrics = Metrics(trainer)
        self.unbuilt: nn.Module | None = None
        """A copy of the module before its network is made, if a rank holds several chunks."""
        self.pending: dict[str, Tensor] = {}
        self.hook: StageHook | None = None
        self.kept: list[nn.Module] = vars(self.module).pop("kept_networks", [])
        """Networks of this module that an earlier stage has trained."""
        connect(trainer, self.module, request.datamodule)
        if not is_lightnings(trainer):
            trainer.state.fn = self.stage
        keep_logged(self.module, self.metrics, self.pending)

    def configure(self) -> Foreign:
        """Returns the settings of the run."""
        flags, trainer, strategy = Flags(), self.trainer, self.trainer.strategy
        self.listeners.check(flags)
        self.listeners.set_up(self.stage)
        self.data.open()
        strategy.give_flags(flags)
        give_trainer(flags, trainer, self.stage, self.data)
        self.data.give_flags(flags, strategy.data_sampler, trainer.accumulate_grad_batches)
        give_model(flags, self.module, self.request.datamodule, self.stage, trainer)
        if self.request.ckpt_path is not None:
            give_ckpt_path(flags, self.request.ckpt_path)
        return flags.configure(strategy.flags)

    def run(self, config: Foreign, started: float) -> ExitDecision | None:
        """Trains or evaluates. Callbacks hear of an exception before it goes on."""
        providers = Providers(
            self.build_model,
            self.data.build_datasets,
            self.build_forward_step,
            build_hooks=self.build_hooks,
            load_first_weights=self.copy_kept_weights if self.kept else None,
            use_torch_distributed=True,
            own_vocabulary=not hasattr(self.module, "build_network"),
        )
        try:
            decision = pretrain_config(config, providers, started)
        except BaseException as error:
            if not is_lightnings(self.trainer):  # which calls it itself
                self.listeners.call("on_exception", error)
            raise
        finally:
            self.trainer.strategy.megatron_parallel = None
            self.listeners.tear_down(self.stage)
        networks = [unwrap_model(network_of(module)) for module in dict.fromkeys(self.modules.values())]
        object.__setattr__(self.module, "kept_networks", networks)
        return decision

    def copy_kept_weights(self, context: Context, model: Sequence[nn.Module], optimizer: MegatronOptimizer) -> None:
        """Fills the network with the weights of an earlier stage of this module, in a run that loads no checkpoint."""
        for chunk, kept in zip(model, self.kept, strict=True):
            mine, theirs = unwrap_model(chunk), kept
            pairs: list[tuple[Tensor, Tensor]] = [*zip(mine.parameters(), theirs.parameters(), strict=True)]
            pairs += zip(mine.buffers(), theirs.buffers(), strict=True)
            if any(each.shape != other.shape for each, other in pairs):
                raise UserError("the module's weights are of another layout; save a checkpoint and give ckpt_path")
            with torch.no_grad():
                for each, other in pairs:
                    if each is not other:
                        each.copy_(other)
        optimizer.after_load()

    def build_model(self, context: Context, stage: Stage) -> nn.Module:
        """Returns the network of a stage. The module's `configure_model` makes it; a module that has none is the
        network itself."""
        module: Foreign = self.module
        if stage.virtual is not None:  # each virtual stage has a module of its own
            self.unbuilt = self.unbuilt or copy_of(module)
            module = copy_of(self.unbuilt) if self.modules else module
        if isinstance(getattr(module, "config", None), TransformerConfig) and not hasattr(module.config, "give_flags"):
            module.config = context.config.transformer
        if self.kept and (defines(module, "configure_model") or hasattr(module, "build_network")):
            module.module = None
        elif self.kept:
            module.module = self.kept[0] if network_of(module) is not module else getattr(module, "module", None)
        if not isinstance(getattr(module, "module", None), nn.Module):
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage.virtual)
            configure = getattr(module, "configure_model", None)
            if hasattr(module, "build_network"):
                module.build_network(context, stage)
            elif callable(configure):
                configure(**Keywords.of(configure).chosen_from({"vp_stage": stage.virtual}))
        network = network_of(module)
        self.modules[id(network)] = module
        return network

    def build_hooks(self, context: Context) -> Sequence[Hook]:
        """Returns the hook that calls callbacks. It has the MegatronParallel of this rank's chunks."""
        connector = CallbackConnector([*self.listeners.callbacks, self.module])
        parallel = MegatronParallel(self.modules.values(), callbacks=connector)
        self.trainer.strategy.megatron_parallel = parallel
        evaluation = KIND_OF_STAGE[self.stage]
        kinds: Sequence[Kind] = ("training", evaluation) if self.stage == "fit" else (evaluation,)
        functions = {kind: functions_of(self.module, kind) for kind in kinds}
        self.hook = StageHook(self.stage, self.listeners, parallel, functions, self.metrics)
        return [self.hook]

    def build_forward_step(self, context: Context) -> ForwardStep:
        """Returns the forward step of the run: that of MegatronParallel, with the functions of training or of the
        stage's evaluations."""
        hook = self.hook
        assert hook is not None, "the run builds its hooks before the forward step"
        steps = {kind: hook.parallel.micro_batch_step(each, self.module_of) for kind, each in hook.functions.items()}
        first = next(iter(self.modules.values()))

        def forward_step(data: Foreign, network: nn.Module) -> tuple[Tensor, LossFunction]:
            kind: Kind = "training" if network.training else KIND_OF_STAGE[self.stage]
            hook.on_micro_batch(self.module_of(network) is first)
            output, loss = steps[kind](data, network)
            return output, functools.partial(self.reported, loss, hook.samples_of_micro_batch(data))

        return forward_step

    def reported(self, loss: LossFunction, samples: int | None, output: Tensor, **keywords: object) -> Foreign:
        """Computes a loss. Its report gets the weight of `samples`, and what the module has logged."""
        found: Foreign = loss(output, **keywords)
        if samples is not None and isinstance(found, tuple) and len(found) == 2:
            found = found[0], {name: weighted(value, samples) for name, value in found[1].items()}
        return with_logged(found, self.pending) if self.pending and isinstance(found, tuple) else found

    def module_of(self, network: nn.Module) -> nn.Module:
        """Returns the module of a chunk as the schedule has it, wrapped. At the first call the module gets the wrapped
        network, whose forward gathers weights."""
        found = self.modules.get(id(network))
        if found is None:
            inner = unwrap_model(network)
            found = self.modules[id(inner)]
            if inner is not found:
                found.module = network
            self.modules[id(network)] = found
        return found


def copy_of(module: Foreign) -> Foreign:
    """Returns a copy of a module that has the same trainer."""
    trainer, module.trainer = module.trainer, None
    copied = copy.deepcopy(module)
    module.trainer = copied.trainer = trainer
    return copied


def is_lightnings(trainer: Foreign) -> bool:
    """Whether a trainer is Lightning's own."""
    return hasattr(trainer, "_data_connector")


def connect(trainer: Foreign, module: nn.Module, datamodule: Foreign) -> None:
    """Makes the trainer known to module and data module, and them to the trainer."""
    module.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    trainer.strategy._lightning_module = module
    if not is_lightnings(trainer):
        trainer.lightning_module, trainer.datamodule = module, datamodule
    elif datamodule is not None:
        trainer._data_connector.attach_datamodule(module, datamodule)


def callbacks_of(trainer: Foreign, module: Foreign) -> list[object]:
    """Returns the callbacks of a trainer and those that the module adds. Raises UserError for a class among them."""
    more = module.configure_callbacks() if defines(module, "configure_callbacks") else []
    found = [*trainer.callbacks, *(more if isinstance(more, list | tuple) else [more])]
    for callback in found:
        if isinstance(callback, type):
            raise UserError(f"callbacks=[{callback.__name__}]: a class; give an object, {callback.__name__}(...)")
    return found
