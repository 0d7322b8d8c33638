"""Fine-tunes a GPT on pairs of prompts and answers with a loop of its own; written from Megatron-LM's documentation."""

import dataclasses
import json
import sys
from functools import partial

import torch

from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.inference_params import InferenceParams
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_model, get_timers, get_tokenizer, initialize_megatron, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_signal_handler
from megatron.training.training import get_optimizer_param_scheduler
from megatron.training.utils import (
    average_losses_across_data_parallel_group,
    calc_params_l2_norm,
    print_rank_last,
    unwrap_model,
)


def add_finetuning_args(parser):
    group = parser.add_argument_group(title="finetuning")
    group.add_argument("--pairs", required=True, help="JSON lines with prompt and answer")
    group.add_argument("--answer-loss-only", action="store_true")
    return parser


class Pairs(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer, seq_length):
        with open(path) as file:
            self.rows = [json.loads(line) for line in file]
        self.tokenizer, self.length = tokenizer, seq_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index % len(self.rows)]
        prompt, answer = self.tokenizer.tokenize(row["prompt"]), self.tokenizer.tokenize(row["answer"])
        ids = (prompt + answer + [self.tokenizer.eod] * self.length)[: self.length + 1]
        ids = torch.tensor(ids, dtype=torch.int64)
        loss_mask = torch.zeros(self.length)
        first = len(prompt) - 1 if get_args().answer_loss_only else 0
        loss_mask[first : len(prompt) + len(answer)] = 1.0
        return {"text": ids, "loss_mask": loss_mask}


def model_provider(pre_process=True, post_process=True):
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm, args.qk_layernorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
    )


def loader_of(dataset, first_sample):
    args, rank, ranks = get_args(), mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    at = first_sample
    while True:
        rows = [dataset[at + rank * args.micro_batch_size + i] for i in range(args.micro_batch_size)]
        at += ranks * args.micro_batch_size
        yield {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def loss_func(loss_mask, output_tensor):
    losses = output_tensor.float()
    loss = torch.sum(losses.view(-1) * loss_mask.view(-1)) / loss_mask.sum().clamp(min=1)
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])}


def forward_step(data_iterator, model):
    get_timers()("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    text, loss_mask = batch["text"].to(device), batch["loss_mask"].to(device)
    positions = torch.arange(text.shape[1] - 1, device=device).expand(len(text), -1)
    get_timers()("batch-generator").stop()
    output = model(text[:, :-1], positions, None, labels=text[:, 1:].contiguous())
    return output, partial(loss_func, loss_mask)


def train_step(data, model, optimizer, scheduler, forward_backward):
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reduced = forward_backward(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=False,
    )
    successful, grad_norm, _ = optimizer.step()
    if successful:
        scheduler.step(increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    return reduced, grad_norm


@torch.no_grad()
def evaluate(dataset, model, forward_backward):
    args = get_args()
    for chunk in model:
        chunk.eval()
    reduced = forward_backward(
        forward_step_func=forward_step,
        data_iterator=loader_of(dataset, 0),
        model=model,
        num_microbatches=args.eval_iters,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=True,
    )
    for chunk in model:
        chunk.train()
    return sum(float(one["lm loss"]) for one in reduced) / max(1, len(reduced)) if reduced else None


@torch.no_grad()
def complete(model, prompt, count):
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.tensor([get_tokenizer().tokenize(prompt)], device=device)
    params, positions = InferenceParams(1, tokens.shape[1] + count), torch.arange(99, device=device)[None]
    done = 0
    for _ in range(count):
        logits = model(
            tokens[:, done:],
            positions[:, done : tokens.shape[1]],
            None,
            inference_params=params,
            runtime_gather_output=True,
        )
        params.sequence_len_offset += tokens.shape[1] - done
        done = tokens.shape[1]
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return get_tokenizer().detokenize(tokens[0].tolist())


def main():
    initialize_megatron(extra_args_provider=add_finetuning_args, args_defaults={"tokenizer_type": "NullTokenizer"})
    args, timers = get_args(), get_timers()
    model = get_model(model_provider, ModelType.encoder_or_decoder)
    settings = {f.name: getattr(args, f.name) for f in dataclasses.fields(OptimizerConfig) if hasattr(args, f.name)}
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), model)
    scheduler = get_optimizer_param_scheduler(optimizer)
    args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(model, optimizer, scheduler)
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    forward_backward = get_forward_backward_func()
    train = Pairs(args.pairs, get_tokenizer(), args.seq_length)
    iteration = args.iteration
    data = loader_of(train, iteration * args.global_batch_size)
    print_rank_0(f"begins at iteration {iteration} with {len(train)} pairs")
    for chunk in model:
        chunk.train()
    timers("interval-time", log_level=0).start(barrier=True)
    while iteration < args.train_iters:
        reduced, norm = train_step(data, model, optimizer, scheduler, forward_backward)
        iteration += 1
        args.consumed_train_samples += args.global_batch_size
        if reduced:
            loss = sum(float(one["lm loss"]) for one in reduced) / len(reduced)
            print_rank_last(f"iteration {iteration} loss {loss:.6f} grad norm {float(norm):.6f}")
        if args.exit_signal_handler and any(get_signal_handler().signals_received()):
            save_checkpoint(iteration, model, optimizer, scheduler, 0)
            print_rank_0("exits by a signal")
            sys.exit(0)
        if args.save and args.save_interval and iteration % args.save_interval == 0:
            save_checkpoint(iteration, model, optimizer, scheduler, 0)
    timers("interval-time").stop()
    timers.log(["interval-time"])
    found = evaluate(train, model, forward_backward)
    if found is not None:
        print_rank_last(f"evaluation {found:.6f}")
    print_rank_0(f"norm of the weights {float(calc_params_l2_norm(model)):.6f}")
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        text = complete(unwrap_model(model[0]), "7 8 9", 4)
        print_rank_0(f"completion {text}")


if __name__ == "__main__":
    main()
