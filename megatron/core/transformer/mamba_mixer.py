"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a token mixer whose heads have states with input-dependent decay."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import group_rank, group_size
from megatron.core.context_parallel.ulysses import start_to_heads, start_to_rows
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import Constant, LogUniform
from megatron.core.ops.split_columns import split_columns
from megatron.core.ops.ssd.scan import mamba_scan_with_state
from megatron.core.tensor_parallel.storage import new_split_vector, part_size
from megatron.core.tokens import Tokens, document_numbers
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.causal_conv1d import CausalConv1d
from megatron.core.transformer.config.hybrid import mamba_heads
from megatron.core.transformer.layer_inputs import LayerInputs, check_scanned_inputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.recurrent_cache import continue_recurrence
from megatron.core.transformer.spec_utils import Spec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MambaMixerSubmodules:
    """Specs of the linear layers of a Mamba-2 mixer."""

    in_proj: Spec
    out_proj: Spec


class MambaMixer(MegatronModule):
    """A Mamba-2 layer without its norm and residual.

    For a token u, with z, x, B, C, dt = W_in u and a state S [n, p] for each head:

        x, B, C = silu(causal convolution of x, B and C)
        step    = max(softplus(dt + dt_bias), mamba_min_time_step)
        S       = exp(-exp(A_log) step) S + step B x^T
        y       = S^T C + D x
        output  = W_out norm(y * silu(z))

    There are `mamba_num_groups` groups of heads, each with one B and C of `mamba_state_dim` values; a head has
    `mamba_head_dim` channels p. The RMSNorm is over the channels of a group. The rows of `in_proj` are, for each group:
    z and x of its heads, B, C, the dt of its heads; the rows of `conv1d` are x, B and C. Tensor parallel ranks divide
    the groups. Context parallel ranks exchange their parts of the rows for some groups of whole rows (all-to-all).
    """

    recomputed_part = "scan"

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.backend = backend or choose_backend(config)
        groups = groups_or_default(pg_collection)
        self.cp_group = groups.cp if groups.size("cp") > 1 else None
        heads, state = mamba_heads(config), config.mamba_state_dim
        self.groups = part_size(config.mamba_num_groups, groups.tp, "mamba_num_groups")
        part_size(self.groups, self.cp_group, "mamba_num_groups on a tensor parallel rank, over context parallel ranks")
        shared = heads // config.mamba_num_groups
        channels = shared * config.mamba_head_dim
        self.widths = [channels, channels + 2 * state, shared]
        """Rows of `in_proj` for one group: z; x, B and C; dt."""
        rows = (config.mamba_num_groups, sum(self.widths))
        self.in_proj = build_heads_projection(
            submodules.in_proj,
            config,
            config.hidden_size,
            rows,
            bias=False,
            name="in_proj",
            tp_group=groups.tp,
            backend=self.backend,
        )
        self.conv1d = CausalConv1d(
            config,
            (config.mamba_num_groups, self.widths[1]),
            config.mamba_conv_kernel_dim,
            bias=True,
            tp_group=groups.tp,
            backend=self.backend,
        )

        self.A_log = new_split_vector(config, heads, LogUniform(1.0, 16.0), groups.tp)
        self.D = new_split_vector(config, heads, Constant(1.0), groups.tp)
        self.dt_bias = new_split_vector(config, heads, TimeStepBias(), groups.tp)
        self.norm_weight = new_split_vector(config, heads * config.mamba_head_dim, Constant(1.0), groups.tp)
        states_dtype = torch.bfloat16 if config.mamba_training_ssm_states_dtype == "bf16" else None
        self.scan = MambaScan(
            config.mamba_head_dim, state, config.mamba_min_time_step, states_dtype, backend=self.backend
        )
        self.out_proj = build_output_projection(
            submodules.out_proj,
            config,
            heads * config.mamba_head_dim,
            groups.tp,
            self.backend,
            bias=False,
            name="out_proj",
        )

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], None) for hidden states [t, h]. Under sequence parallelism both hold this rank's
        tokens; the states pass through this rank's groups of all tokens."""
        check_scanned_inputs(inputs, "Mamba-2")
        tokens, ranks = inputs.tokens, group_size(self.cp_group)
        projected = self.in_proj(hidden_states)[0].view(tokens.seq_length, tokens.batch_size, self.groups, -1)
        if ranks > 1:  # gates stay with their rows
            gate, scanned = split_columns(projected, [self.widths[0], sum(self.widths[1:])])
            (scanned,) = start_to_heads([scanned], self.cp_group, ranks).wait()  # [ranks * s, b, g / ranks, ...]
            mixed, step = split_columns(scanned, self.widths[1:])
            tokens = Tokens(tokens.row_length, tokens.batch_size, cu_seqlens=tokens.cu_seqlens)
        else:
            gate, mixed, step = split_columns(projected, self.widths)  # [s, b, g, ...] each
        document = document_numbers(tokens, hidden_states.device)
        parameters = self._own(self.dt_bias), self._own(self.A_log), self._own(self.D)
        context = inputs.inference_context
        if context is None:
            output = self.scan(self._convolved(mixed, document, silu=True), step, *parameters, document)
        else:
            output = continue_recurrence(
                context,
                self.layer_number,
                mixed,
                self.conv1d.weight.shape[1],
                lambda rows: self._convolved(rows, None),
                lambda convolved, *seen: self.scan.advance(convolved, step, parameters, *seen),
            )
        if ranks > 1:
            output = start_to_rows(output, self.cp_group, ranks).wait()
        weight, epsilon = self.norm_weight.view(gate.shape[2:]), self.config.layernorm_epsilon
        normed = self.backend.recurrence.gated_rms_norm(output, gate, weight, epsilon, gate_first=True)
        return self.out_proj(normed.flatten(2).flatten(0, 1))

    def _own(self, parameter: Tensor) -> Tensor:
        """Returns the part of a parameter that belongs to the groups of this context parallel rank."""
        if self.cp_group is None:  # no chunk of one part, whose backward would copy the gradient
            return parameter
        return parameter.chunk(group_size(self.cp_group))[group_rank(self.cp_group)]

    def _convolved(self, mixed: Tensor, document: Tensor | None, silu: bool = False) -> Tensor:
        weight, bias = self._own(self.conv1d.weight), self._own(self.conv1d.bias)
        return self.backend.recurrence.causal_conv(mixed, weight, bias, document, silu)


class MambaScan(nn.Module):
    """The recurrence of a Mamba-2 layer, without parameters. `--recompute-modules core_attn` recomputes this module."""

    def __init__(
        self,
        head_dim: int,
        state_dim: int,
        min_step: float,
        states_dtype: torch.dtype | None = None,
        *,
        backend: Backend,
    ) -> None:
        """`states_dtype` is the type of the states that are kept between chunks; None: that of the computation."""
        super().__init__()
        self.backend = backend
        self.settings: dict[str, Any] = {
            "head_dim": head_dim,
            "state_dim": state_dim,
            "min_step": min_step,
            "states_dtype": states_dtype,
        }

    def forward(
        self, mixed: Tensor, step: Tensor, step_bias: Tensor, log_rate: Tensor, skip: Tensor, document: Tensor | None
    ) -> Tensor:
        """Returns y [s, b, g, channels] for x, B and C of each group [s, b, g, channels + 2 n], dt [s, b, g, heads of a
        group], and dt_bias, A_log and D of each head."""
        return self.backend.recurrence.mamba_scan(mixed, step, step_bias, log_rate, skip, document, **self.settings)

    def advance(
        self,
        mixed: Tensor,
        step: Tensor,
        parameters: tuple[Tensor, Tensor, Tensor],
        state: Tensor | None,
        ended: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns y and the states [b, heads, n, p] after the last token, from the states before the first. Tokens
        where `ended` [s, b, 1] is True change no state."""
        return mamba_scan_with_state(mixed, step, *parameters, state=state, ended=ended, **self.settings)


@dataclass(frozen=True)
class TimeStepBias:
    """Initial values of dt_bias: softplus(dt_bias) is a step size between 0.001 and 0.1 with a uniform logarithm."""

    least: float = 0.001
    most: float = 0.1

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fills a whole tensor with torch's generator; returns it."""
        step = torch.empty_like(tensor).uniform_(math.log(self.least), math.log(self.most)).exp_()
        return tensor.copy_(step + torch.log(-torch.expm1(-step)))
