"""A model of your own:   torchrun --nproc_per_node 4 examples/custom_model/pretrain_custom.py --num-layers 4 ...

A gated convolutional language model (after Dauphin et al. 2017, arXiv:1612.08083) out of the library's parallel layers.
It trains under tensor, sequence, pipeline and data parallelism, sharded or not, with the application's flags, data,
checkpoints and logs. README.md explains the steps; nothing outside this file knows the model.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.models.common.language_model_head import LanguageModelHead
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.storage import new_parameter, split_box
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import layers_of_stage
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import pretrain
from megatron.training.providers import Context, ForwardStep, Providers, Stage
from pretrain_gpt import build_datasets, loss_func


class ConvolutionLayer(MegatronModule):
    """x + W_out (silu(gate) * convolution(up)), with gate and up = W_in norm(x).

    The convolution is causal and by channel: output token t sees up at t - width + 1 to t. Tensor parallel ranks share
    the channels, so that only the two linear layers communicate.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, width: int, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.canonical_index = layer_number - 1  # the number in parameter names, counted over the whole model
        h, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.norm = WrappedTorchNorm(config, h, config.layernorm_epsilon)
        linear: dict[str, Any] = {"config": config, "bias": False, "tp_group": groups.tp}
        self.linear_in = ColumnParallelLinear(
            h, 2 * ffn, init_method=config.init_method, canonical_shape=(2, ffn), split_dim=1, **linear
        )
        box = split_box((ffn, width), 0, groups.tp)  # this rank's channels
        self.filters = new_parameter(
            config, box.shape, config.init_method, global_shape=(ffn, width), box=box, sharded_axes=frozenset({"tp"})
        )
        self.linear_out = RowParallelLinear(
            ffn, h, init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=False, **linear
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism this rank's part of the tokens."""
        gate, up = self.linear_in(self.norm(hidden))[0].chunk(2, dim=-1)  # [s, b, ffn / tp] each
        width = self.filters.shape[1]
        rows = F.pad(up.permute(1, 2, 0), (width - 1, 0))  # [b, ffn / tp, width - 1 + s]
        mixed = F.conv1d(rows, self.filters.unsqueeze(1), groups=self.filters.shape[0])
        return hidden + self.linear_out(F.silu(gate) * mixed.permute(2, 0, 1))[0]


class ConvolutionModel(MegatronModule):
    """Embedding, layers, norm, head; or the part of them that a pipeline stage holds."""

    def __init__(self, context: Context, stage: Stage, width: int) -> None:
        config, groups = context.config.transformer, context.environment.groups
        super().__init__(config)
        refuse_what_has_no_effect(config)
        self.pg_collection, self.pre_process, self.post_process = groups, stage.pre_process, stage.post_process
        self.input_tensor: Tensor | None = None
        padding = context.config.model.make_vocab_size_divisible_by * config.tensor_model_parallel_size
        vocabulary: dict[str, Any] = {"tp_group": groups.tp, "vocab_padding_multiple": padding}
        if stage.pre_process:
            self.embedding = VocabParallelEmbedding(
                context.vocab_size,
                config.hidden_size,
                init_method=config.embedding_init_method,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                **vocabulary,
            )
        numbers = layers_of_stage(config, groups, stage.virtual)
        self.layers = nn.ModuleList(ConvolutionLayer(config, number, width, groups) for number in numbers)
        if stage.post_process:
            self.norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.output_layer = LanguageModelHead(
                config.hidden_size,
                context.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                **vocabulary,
            )
        name_parameters(self)
        initialize_parameters(self, config.seed)

    def set_input_tensor(self, input_tensor: list[Tensor | None] | Tensor | None) -> None:
        """Takes hidden states [s, b, h] from the stage before, for the next forward."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Token ids and labels [b, s] -> the loss of each token [b, s]; on earlier stages hidden states [s, b, h]."""
        hidden = self.input_tensor
        if self.pre_process:
            hidden = self.embedding(tokens)
            hidden = hidden if self.config.sequence_parallel else hidden.transpose(0, 1)  # [s, b, h]
        assert hidden is not None
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.post_process:
            return hidden
        losses, _ = self.output_layer(self.norm(hidden), labels=labels.t())
        return losses.t().contiguous()


def refuse_what_has_no_effect(config: TransformerConfig) -> None:
    """Raises UserError for settings that this model would ignore."""
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(config, name):
            raise UserError(f"--{name.replace('_', '-')} {getattr(config, name)}: this model has no dropout; give 0")
    if config.context_parallel_size > 1:
        raise UserError("--context-parallel-size: the convolution needs whole rows; give 1")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds this model's flags."""
    group = parser.add_argument_group("convolution")
    group.add_argument("--convolution-width", type=int, default=4, help="Tokens that a convolution sees.")
    return parser


def build_model(context: Context, stage: Stage) -> ConvolutionModel:
    """Builds the model chunk of a stage."""
    return ConvolutionModel(context, stage, context.config.extra["convolution_width"])


def build_forward_step(context: Context) -> ForwardStep:
    """Returns the forward step: one micro-batch's losses, and the function that averages them."""

    def forward_step(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(data).to(context.environment.device, non_blocking=True)
        return model(batch.tokens, batch.labels), lambda losses: loss_func(batch.loss_mask, losses)

    return forward_step


if __name__ == "__main__":
    pretrain(Providers(build_model, build_datasets, build_forward_step), extra_args_provider=add_flags)
