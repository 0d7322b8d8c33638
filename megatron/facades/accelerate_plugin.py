"""What Hugging Face Accelerate's Megatron plugin imports beside the functions of scripts: underscored names, mostly.

    import megatron  # first: Accelerate asks which version of megatron-core is installed
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMPlugin, MegatronLMDummyScheduler

    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, pp_degree=2, context_parallel_size=1))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The plugin parses and checks the arguments, sets the global variables, and starts the run with
`_initialize_distributed`. From then on it counts samples itself and takes the seven results that a training step had
before release 0.16. docs/api.md says what works.
"""

import argparse
from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import padded_vocab_size
from megatron.facades import global_vars
from megatron.facades.initialize import initialize_megatron
from megatron.facades.utils import print_rank_last
from megatron.training.config.flag_table import flag_table

_NORM_OF_WEIGHTS = "log_params_norm"
"""The plugin would compute it of an attribute that its engine does not have."""


def _initialize_distributed(
    get_embedding_ranks: object = None, get_position_embedding_ranks: object = None, store: object = None
) -> None:
    """Starts the run of the arguments that `set_global_variables` was given, in the process group that exists or in a
    new one. Raises UserError for arguments: the defaults are used."""
    if not (get_embedding_ranks is get_position_embedding_ranks is store is None):
        raise UserError("_initialize_distributed(...): takes no arguments here; leave them out")
    initialize_megatron(parsed_args=global_vars.get_args())
    global_vars.serve_plugin()


def _set_random_seed(seed_: int, data_parallel_random_init: bool = False, *others: object) -> None:
    """Checks the seed: initial weights and dropout masks are functions of it and need no generator. Raises UserError
    for another seed than that of the arguments."""
    used = global_vars.get_args().seed
    if seed_ != used:
        raise UserError(f"_set_random_seed({seed_}): the run was started with seed {used}; pass --seed {seed_}")


def _init_autoresume() -> None:
    """Does nothing: there is no autoresume; see `get_adlr_autoresume`."""


def _compile_dependencies() -> None:
    """Does nothing: kernels are compiled when they are first used."""


def set_jit_fusion_options() -> None:
    """Does nothing: kernels are chosen when a layer is built."""


def _vocab_size_with_padding(orig_vocab_size: int, args: argparse.Namespace, logging_enabled: bool = True) -> int:
    """Returns the rows of the embedding table for a vocabulary: padded as the arguments say."""
    return padded_vocab_size(orig_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def _add_data_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser unchanged: the flags of data are read by `parse_args`."""
    return parser


def _add_validation_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser unchanged: the flags of evaluation are read by `parse_args`."""
    return parser


def _add_logging_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the switches --log-..., which the plugin turns on with `set_all_logging_options`."""
    for name, flag in flag_table().items():
        if name.startswith("log_") and flag.default is False and name != _NORM_OF_WEIGHTS:
            parser.add_argument(flag.spelling, action="store_true", dest=name)
    return parser


def write_args_to_tensorboard() -> None:
    """Writes each argument as a text into --tensorboard-dir, on the rank that logs."""
    writer = global_vars.open_tensorboard_writer()
    if writer is not None:
        for name, value in sorted(vars(global_vars.get_args()).items()):
            writer.add_text(name, str(value))


def training_log(
    loss_dict: Mapping[str, Tensor],
    total_loss_dict: MutableMapping[str, Tensor],
    learning_rate: float,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | None,
    params_norm: float | None,
    num_zeros_in_grad: int | None,
) -> bool:
    """Writes a step into --tensorboard-dir, and every --log-interval steps a line with the means since the last line.
    `total_loss_dict` holds the sums in between. Returns False: memory is reported once."""
    args, writer = global_vars.get_args(), global_vars.get_tensorboard_writer()
    scalars = {"learning-rate": learning_rate, "loss-scale": loss_scale, "grad-norm": grad_norm}
    scalars |= {"params-norm": params_norm, "num-zeros": num_zeros_in_grad}
    scalars |= {name: float(loss) for name, loss in loss_dict.items() if loss.ndim == 0}
    if writer is not None and iteration % args.tensorboard_log_interval == 0:
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(name, value, iteration)
    if skipped_iter:
        total_loss_dict["skipped"] = total_loss_dict.get("skipped", torch.zeros(())) + 1
    for name, loss in loss_dict.items():
        if not skipped_iter and loss.ndim == 0:
            total_loss_dict[name] = total_loss_dict.get(name, torch.zeros(())) + loss.detach().cpu()
    if iteration % args.log_interval == 0:
        skipped = int(total_loss_dict.pop("skipped", torch.zeros(())))
        steps = max(args.log_interval - skipped, 1)
        means = [f"{name}: {float(total) / steps:.6E}" for name, total in total_loss_dict.items()]
        norm = [] if grad_norm is None else [f"grad norm: {grad_norm:.3f}"]
        head = [f"iteration {iteration:8d}/{args.train_iters:8d}", f"learning rate: {learning_rate:.6E}"]
        print_rank_last(" | ".join([*head, *means, *norm, f"skipped iterations: {skipped}"]))
        total_loss_dict.clear()
    return False
