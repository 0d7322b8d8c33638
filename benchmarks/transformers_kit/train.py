"""Trains transformers' Llama on one GPU as its users do: torch.compile, SDPA, fused AdamW, autocast to bfloat16.

    GPU_KIT=benchmarks/transformers_kit benchmarks/compare.sh LLAMA1B

Reads the flags of a Llama cell and ignores others. Weights, gradients and moments are float32, as with `--bf16` of
transformers' own Trainer; `--bf16-weights` keeps all of them in bfloat16, which is faster and loses small updates. The
optimizer, clipping, batch and random tokens are those of benchmarks/bench.py. Writes the lines that add_row.py reads.
"""

import argparse
import time

import torch
from torch import nn


def read_flags() -> argparse.Namespace:
    """Returns the flags that describe the model and the batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
                 "kv-channels", "vocab-size", "seq-length", "micro-batch-size", "global-batch-size",
                 "train-iters"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rotary-base", type=float, default=10000.0)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--bf16-weights", action="store_true")
    return parser.parse_known_args()[0]


def build_model(flags: argparse.Namespace) -> nn.Module:
    """Returns the model on its device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # type: ignore[call-arg]  # attn_implementation is an argument of its base
        vocab_size=flags.vocab_size, hidden_size=flags.hidden_size, intermediate_size=flags.ffn_hidden_size,
        num_hidden_layers=flags.num_layers, num_attention_heads=flags.num_attention_heads,
        num_key_value_heads=flags.num_query_groups, head_dim=flags.kv_channels, rms_norm_eps=1e-5,
        max_position_embeddings=flags.seq_length, tie_word_embeddings=False, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": flags.rotary_base}, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device()):
        model = LlamaForCausalLM(config)
    return model.bfloat16() if flags.bf16_weights else model


def device() -> str:
    """Returns the kind of device: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def step_flops(flags: argparse.Namespace) -> float:
    """Returns the model FLOPs of a step; causal attention counts once."""
    heads = flags.kv_channels * flags.num_attention_heads
    attention = flags.hidden_size * (2 * heads + 2 * flags.kv_channels * flags.num_query_groups)
    layer = attention + 3 * flags.hidden_size * flags.ffn_hidden_size + flags.seq_length * heads
    token = flags.num_layers * layer + flags.hidden_size * flags.vocab_size
    return 6.0 * token * flags.global_batch_size * flags.seq_length


def random_tokens(flags: argparse.Namespace) -> torch.Tensor:
    """Returns a micro-batch of tokens; token i is about as frequent as 1 / (i + 1)."""
    share = torch.rand(flags.micro_batch_size, flags.seq_length, device=device(), dtype=torch.float64)
    return ((flags.vocab_size + 1.0) ** share).long().sub(1).clamp(max=flags.vocab_size - 1)


def main() -> None:
    """Trains the model and prints the time of each interval."""
    flags = read_flags()
    torch.set_float32_matmul_precision("high")
    model = build_model(flags)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, flags.train_iters, 1e-5)
    microbatches = flags.global_batch_size // flags.micro_batch_size
    begin = time.perf_counter()
    for iteration in range(1, flags.train_iters + 1):
        total = torch.zeros((), device=device())
        for _ in range(microbatches):
            tokens = random_tokens(flags)
            with torch.autocast(device(), torch.bfloat16, enabled=not flags.bf16_weights):
                loss = compiled(input_ids=tokens, labels=tokens).loss / microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if iteration % flags.log_interval == 0:
            value = total.item()  # waits for the device
            seconds = (time.perf_counter() - begin) / flags.log_interval
            print(
                f"iteration {iteration}/ {flags.train_iters} | elapsed time per iteration (ms): {seconds * 1e3:.1f} | "
                f"throughput per GPU (TFLOP/s/GPU): {step_flops(flags) / seconds / 1e12:.1f} | lm loss: {value:.6E}",
                flush=True,
            )
            begin = time.perf_counter()
    if device() == "cuda":
        print(f"max allocated: {torch.cuda.max_memory_allocated() / 2**20:.1f}")


if __name__ == "__main__":
    main()
