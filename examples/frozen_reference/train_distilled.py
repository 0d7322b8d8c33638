"""Distillation from logits:   torchrun --nproc_per_node 2 examples/frozen_reference/train_distilled.py --teacher DIR

    loss = (1 - a) cross entropy + a T^2 KL(softmax(teacher / T) || softmax(student / T))

The teacher is the frozen model of a checkpoint, with sizes of its own and the student's vocabulary (Hinton et al. 2015,
arXiv:1503.02531). Data and all other flags are those of pretrain_gpt.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.frozen_reference.frozen import frozen_model
from megatron.core.exceptions import UserError
from megatron.training import pretrain
from megatron.training.data.step_data import StepData
from megatron.training.providers import Context, ForwardStep, LossFunction, Providers
from pretrain_gpt import build_datasets, build_model, describe_tokens


def distillation_losses(student: Tensor, teacher: Tensor, labels: Tensor, share: float, heat: float) -> Tensor:
    """Returns the loss of each token [b, s], for logits [b, s, vocabulary] and labels [b, s], in float32 at least."""
    wide = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(wide), teacher.to(wide)
    hard = F.cross_entropy(student.transpose(1, 2), labels, reduction="none")
    logs = F.log_softmax(student / heat, -1), F.log_softmax(teacher / heat, -1)
    soft = F.kl_div(*logs, reduction="none", log_target=True).sum(-1)
    return (1.0 - share) * hard + share * heat**2 * soft


def build_forward_step(context: Context) -> ForwardStep:
    """Returns the forward step: the student's logits, and the loss that compares them with the teacher's."""
    device, extra = context.environment.device, context.config.extra
    teacher = frozen_model(context, extra["teacher"], "--teacher")
    share, heat = extra["distillation_share"], extra["distillation_temperature"]
    if not (0.0 <= share <= 1.0 and heat > 0.0):
        raise UserError("--distillation-share must be in [0, 1], --distillation-temperature larger than 0")

    def forward_step(data: StepData, model: nn.Module) -> tuple[Tensor, LossFunction]:
        batch = next(data).to(device, non_blocking=True)
        inputs = batch.tokens, batch.position_ids, batch.attention_mask
        with torch.no_grad():
            theirs = teacher(*inputs, runtime_gather_output=True)
        tokens = describe_tokens(batch, data, None, batch.tokens.shape[1])

        def loss_func(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if logits.shape != theirs.shape:
                raise UserError(f"--teacher has {theirs.shape[-1]} tokens, the student {logits.shape[-1]}")
            losses = distillation_losses(logits, theirs, batch.labels, share, heat)
            total, count = (losses * batch.loss_mask).sum(), batch.loss_mask.sum().to(torch.int64)
            return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

        return model(*inputs, runtime_gather_output=True, tokens=tokens), loss_func

    return forward_step


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of this script."""
    group = parser.add_argument_group("distillation")
    group.add_argument("--teacher", help="Folder of the teacher's checkpoints.")
    group.add_argument("--distillation-share", type=float, default=0.5, help="Weight of the teacher in the loss.")
    group.add_argument("--distillation-temperature", type=float, default=1.0, help="Softens both distributions.")
    return parser


PROVIDERS = Providers(build_model, build_datasets, build_forward_step)

if __name__ == "__main__":
    pretrain(PROVIDERS, extra_args_provider=add_flags, args_defaults={"model_family": "gpt"})
