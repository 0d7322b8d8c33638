"""A model and a training loop of a user's own over megatron.core: tensor and pipeline parallel, with a checkpoint.

    torchrun --nproc_per_node 2 own_model.py --tp 2 --pp 1 --iters 4 --ckpt DIR

Written from Megatron-LM's documentation alone.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.utils import divide, get_model_config

VOCAB, SEQ, BATCH = 32, 8, 2


class ParallelMLP(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        h = config.hidden_size
        self.norm = torch.nn.LayerNorm(h)
        self.up = tensor_parallel.ColumnParallelLinear(
            h, 4 * h, config=config, init_method=config.init_method, gather_output=False
        )
        self.down = tensor_parallel.RowParallelLinear(
            4 * h,
            h,
            config=config,
            init_method=config.output_layer_init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x):
        hidden, _ = self.up(self.norm(x))
        out, _ = self.down(torch.nn.functional.gelu(hidden))
        return x + out


class BagOfMLPs(MegatronModule):
    """Embedding, residual MLPs, an output layer over the vocabulary."""

    def __init__(self, config, pre_process, post_process):
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        layers = divide(config.num_layers, parallel_state.get_pipeline_model_parallel_world_size())
        if pre_process:
            self.embedding = tensor_parallel.VocabParallelEmbedding(
                VOCAB, config.hidden_size, init_method=config.init_method, config=config
            )
        self.layers = torch.nn.ModuleList(ParallelMLP(config) for _ in range(layers))
        if post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size, VOCAB, config=config, init_method=config.init_method, bias=False
            )
        self.input_tensor = None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        # Layers are counted over the whole pipeline in a checkpoint.
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        first = parallel_state.get_pipeline_model_parallel_rank() * len(self.layers)
        for name, part in state.items():
            if name.startswith(f"{prefix}layers."):
                number, _, rest = name.removeprefix(f"{prefix}layers.").partition(".")
                part.key = f"{prefix}layers.{first + int(number)}.{rest}"
        return state

    def set_input_tensor(self, input_tensor):
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens, labels):
        x = self.embedding(tokens).transpose(0, 1).contiguous() if self.pre_process else self.input_tensor  # [s, b, h]
        for layer in self.layers:
            x = layer(x)
        if not self.post_process:
            return x
        logits, _ = self.output_layer(x)
        return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous()).t()


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        row = (start + torch.arange(SEQ + 1)) % VOCAB
        yield {"tokens": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)

    def loss_func(output_tensor):
        loss = output_tensor.mean()
        return loss, {"loss": loss.detach()}

    device = next(model.parameters()).device
    return model(batch["tokens"].to(device), batch["labels"].to(device)), partial(loss_func)


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("iters", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ckpt")
    args = parser.parse_args()
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    model_parallel_cuda_manual_seed(42)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    torch.manual_seed(7)
    model = BagOfMLPs(config, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(device))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0), [model])
    get_model_config(model).finalize_model_grads_func = finalize_model_grads
    forward_backward, data = get_forward_backward_func(), batches(parallel_state.get_data_parallel_rank())
    for iteration in range(args.iters):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=4,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            print(f"iteration {iteration} loss {sum(float(x['loss']) for x in losses) / len(losses):.6f}", flush=True)
    if args.ckpt:
        if dist.get_rank() == 0:
            Path(args.ckpt).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(sharded_state_dict=model.module.sharded_state_dict(prefix=""), checkpoint_dir=args.ckpt)
        before = {name: value.clone() for name, value in model.module.state_dict().items() if torch.is_tensor(value)}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        loaded = dist_checkpointing.load(
            sharded_state_dict=model.module.sharded_state_dict(prefix=""), checkpoint_dir=args.ckpt
        )
        model.module.load_state_dict(loaded)
        after = model.module.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        print("checkpoint restored", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
