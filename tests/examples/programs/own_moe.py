"""A mixture of experts with a layer spec of a user's own: another norm, and a router that prefers low experts.

    torchrun --nproc_per_node 2 own_moe.py --ep 2

Written from Megatron-LM's documentation alone.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class PlainRMSNorm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype) * self.weight


class LowFirstRouter(TopKRouter):
    """Adds a constant that prefers experts with low numbers."""

    def routing(self, logits, padding_mask=None):
        bias = torch.linspace(0.5, 0.0, logits.shape[-1], device=logits.device)
        return topk_routing_with_score_function((logits + bias).flatten(0, -2), self.topk)


class LowFirstMoELayer(MoELayer):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.router = LowFirstRouter(config=config, pg_collection=kwargs.get("pg_collection"))


def layer_spec():
    local = get_gpt_layer_local_spec(num_experts=4).submodules
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PlainRMSNorm,
            self_attention=local.self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PlainRMSNorm,
            mlp=ModuleSpec(module=LowFirstMoELayer, submodules=local.mlp.submodules),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def forward_step(data_iterator, model):
    row = next(data_iterator)
    tokens, labels = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def loss_func(output_tensor):
        return output_tensor.sum(), torch.tensor(output_tensor.numel()), {"lm loss": output_tensor.detach().mean()}

    return model(tokens, positions, None, labels=labels), partial(loss_func)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=args.ep)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        expert_model_parallel_size=args.ep,
    )
    model = GPTModel(config=config, transformer_layer_spec=layer_spec(), vocab_size=32, max_sequence_length=8)
    layers = model.decoder.layers
    assert all(isinstance(layer.mlp, LowFirstMoELayer) and not isinstance(layer.mlp, MLP) for layer in layers)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    run = get_forward_backward_func()
    for iteration in range(4):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        mine = iter(rows[rank::size].split(1))
        reports = run(
            forward_step_func=forward_step,
            data_iterator=mine,
            model=ddp,
            num_microbatches=4 // size,
            seq_length=8,
            micro_batch_size=1,
        )
        loss = torch.stack([report["lm loss"] for report in reports]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"iteration {iteration} loss {loss.item() / size:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
