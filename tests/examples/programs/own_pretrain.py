"""pretrain() with a data set, metrics and flags of a user's own.

    python own_pretrain.py --num-layers 2 ... --period 5

Written from Megatron-LM's documentation alone.
"""

from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from torch.utils.data import Dataset


class Counting(Dataset):
    """Rows that count upwards, modulo a period."""

    def __init__(self, size, length, period):
        self.size, self.length, self.period = size, length, period

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        row = (index + torch.arange(self.length + 1)) % self.period
        return {"text": row, "weight": torch.tensor(1.0 if index % 2 else 0.5)}


def add_arguments(parser):
    group = parser.add_argument_group("counting")
    group.add_argument("--period", type=int, default=7, help="Numbers before the count starts again.")
    group.add_argument("--report-accuracy", action="store_true")
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    print_rank_0(f"counting modulo {args.period}")
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    return tuple(Counting(size, args.seq_length, args.period) for size in train_val_test_num_samples)


def loss_func(weight, labels, losses):
    losses = losses.float()
    weights = weight[:, None].expand_as(losses)
    total, count = (losses * weights).sum(), torch.tensor(losses.numel(), dtype=torch.int)
    report = {"lm loss": torch.stack([total.detach(), count.to(total)])}
    if get_args().report_accuracy:
        report["sure tokens"] = torch.stack([(losses.detach() < 2.3).sum().to(total), count.to(total)])
        report["largest loss"] = losses.detach().max()
    return total, count, report


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    device = next(model.parameters()).device
    text, weight = batch["text"].to(device), batch["weight"].to(device)
    timers("batch-generator").stop()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), partial(loss_func, weight, labels)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
