"""Export to Megatron-LM: a checkpoint becomes a folder in one of its formats, from which Megatron-LM continues.

The folder is what torch.distributed.checkpoint reads. One tensor is in memory at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron.conversion.megatron_lm.dist_exporting import write_dist_folder
from megatron.conversion.megatron_lm.exported_tensors import ExportedTensors
from megatron.conversion.megatron_lm.plain_exporting import write_plain_folder
from megatron.conversion.model_folder import new_folder, refuse_used
from megatron.conversion.spellings import changes_nothing
from megatron.core.dist_checkpointing.checkpoint_selection import Log, open_newest
from megatron.core.dist_checkpointing.folders import RELEASE, Step, folder_name, write_tracker
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import words_of_spec
from megatron.training.inspection.run_description import MODEL_OPTIONS, architecture_of
from megatron.training.trained_model import config_for_one_process

ExportFormat = Literal["torch_dist", "torch_dcp", "fsdp_dtensor"]


@dataclass(frozen=True)
class ExportedRun:
    """Result of an export."""

    folder: Path
    nbytes: int
    with_optimizer: bool


def export_run(
    root: Path,
    target: Path,
    *,
    step: Step | None = None,
    spec: Sequence[str] | None = None,
    is_local: bool = False,
    ckpt_format: ExportFormat = "torch_dist",
    tokenizer: Path | None = None,
    log: Log = print,
) -> ExportedRun:
    """Writes a checkpoint under `root` (the newest whole one, or that of `step`) into the folder `target`, in one of
    Megatron-LM's formats, with its tracker file.

    The rows of the vocabulary are padded with zeros as --make-vocab-size-divisible-by says. Only Adam's optimizer state
    is exported; a line says so if there is another. `spec` are module and name of the layers of a model with --spec.
    `tokenizer` is the --tokenizer-model of the result in place of the run's.
    Norms have the names of Transformer Engine's layers, with `is_local` those of Megatron-LM's own layers.
    Raises UserError if `target` is not empty, for layers whose names in Megatron-LM are not known, and for model
    options that Megatron-LM lacks.
    """
    refuse_used(target)
    checkpoint = open_newest(root, step, log)
    config = config_for_one_process(checkpoint.manifest.config, words_of_spec(spec), has_cuda=False)
    _check_model(config)
    if config.optimizer.optimizer not in ("adam", "sgd"):
        log(f"the moments of --optimizer {config.optimizer.optimizer} are left behind: its format there is not known")
    found: Step = checkpoint.manifest.iteration if "train_state" in checkpoint.manifest.common else RELEASE
    if tokenizer is not None:
        config = replace(config, tokenizer=replace(config.tokenizer, tokenizer_model=str(tokenizer.absolute())))
    with new_folder(target, "exported") as (disk, aside):
        folder = aside / folder_name(found)
        disk.make_directory(folder)
        tensors = ExportedTensors(checkpoint, config, is_local)
        with_optimizer = tensors.has_adam(log)
        if ckpt_format == "torch_dist":
            nbytes = write_dist_folder(tensors, folder, with_optimizer)
        else:
            nbytes, with_optimizer = write_plain_folder(tensors, ckpt_format, folder, with_optimizer, log)
        write_tracker(disk, aside, found)
    return ExportedRun(target / folder_name(found), nbytes, with_optimizer)


def _check_model(config: PretrainConfig) -> None:
    if config.flat()["model_family"] not in (None, "gpt"):
        raise UserError("only GPT models can be exported to Megatron-LM so far")
    own = ", ".join(spelling_of(name) for name in _own_options(config))
    if own:
        raise UserError(f"the model has {own}, without which Megatron-LM computes another function")


_THEIR_OPTIONS = frozenset(
    ("moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_apply_probs_on_input")
)
"""Those of `MODEL_OPTIONS` that Megatron-LM has too."""
_OWN_SWITCHES = ("relu", "geglu", "exact_geglu")
"""Activations that Megatron-LM has no flag for."""
_BY_WIDTH = ("softmax_scale", "embedding_multiplier", "logit_scale")
"""What --use-mup sets, which Megatron-LM has."""


def _own_options(config: PretrainConfig) -> list[str]:
    """Returns the fields that Megatron-LM has no flag for, where they change what the model computes."""
    values, turned = config.flat(), architecture_of(config)
    own = [name for name in MODEL_OPTIONS if name in turned and name not in _THEIR_OPTIONS]
    own += [name for name in _OWN_SWITCHES if values[name]]
    own += ["softmax_scale"] if values["softmax_scale"] is not None else []
    own = [name for name in own if not (values["use_mup"] and name in _BY_WIDTH)]
    own = [name for name in own if name != "rope_scaling_type" or values[name] != "llama3"]  # --use-rope-scaling there
    return [name for name in own if not changes_nothing(name, values)]
