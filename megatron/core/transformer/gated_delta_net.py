"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention whose state forgets and corrects itself."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.collectives import group_rank, group_size
from megatron.core.context_parallel.ulysses import start_to_heads, start_to_rows
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import Constant, LogUniform
from megatron.core.ops.delta_rule.attention import betas, log_decays, split_heads_of_unit_length
from megatron.core.ops.delta_rule.chunked import gated_delta_rule
from megatron.core.ops.precision import widened
from megatron.core.ops.split_columns import split_columns
from megatron.core.parameters import add_partial_gradient_axis
from megatron.core.tensor_parallel.storage import new_split_vector, part_size
from megatron.core.tokens import Tokens, document_numbers
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.causal_conv1d import CausalConv1d
from megatron.core.transformer.layer_inputs import LayerInputs, check_scanned_inputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.recurrent_cache import continue_recurrence
from megatron.core.transformer.spec_utils import Spec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recomputed import DiscardedResults


@dataclass
class GatedDeltaNetSubmodules:
    """Specs of the parts of a gated delta net."""

    in_proj: Spec
    out_norm: Spec
    out_proj: Spec


class GatedDeltaNet(MegatronModule):
    """A token mixer whose heads each keep one matrix that maps keys to values, instead of all keys and values.

    For a token x, with q, k, v, z, b, a = W_in x for each head:

        q, k, v = silu(causal convolution of q, k and v)
        S       = exp(-exp(A_log) softplus(a + dt_bias)) S
        S       = S + sigmoid(b) k' (v - S^T k')^T         k' = k / |k|
        output  = W_out (norm(S^T q') * silu(z))           q' = q / (|q| sqrt(dk))

    There are `linear_num_key_heads` query and key heads of dk = `linear_key_head_dim` channels, and
    `linear_num_value_heads` value heads of `linear_value_head_dim` channels. Equal numbers of consecutive value heads
    share a key head. The rows of `in_proj` are, for each key head: q, k, the values and gates z of its value heads,
    then their b and a. The rows of `conv1d` are q, k and the values. Tensor parallel ranks divide the key heads.
    Context parallel ranks exchange their parts of the rows for some key heads of whole rows (all-to-all).

    The norm has the config's kind and covers each head separately; its weight is not zero-centred.

    Backward computes the convolution and the gated norm again, which takes a fraction of the time of the products
    around them, and keeps their inputs alone.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
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
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
        assert key_heads and value_heads and dk and dv and config.linear_conv_kernel_dim
        self.key_heads = part_size(key_heads, groups.tp, "linear_num_key_heads")
        of_rank = "linear_num_key_heads on a tensor parallel rank, over context parallel ranks"
        part_size(self.key_heads, self.cp_group, of_rank)
        shared = value_heads // key_heads
        self.widths = [2 * dk + shared * dv, shared * dv, shared, shared]
        """Rows of `in_proj` for one key head: q, k and v; z; b; a."""
        self.in_proj = build_heads_projection(
            submodules.in_proj,
            config,
            config.hidden_size,
            (key_heads, sum(self.widths)),
            bias=False,
            name="in_proj",
            tp_group=groups.tp,
            backend=self.backend,
        )
        self.conv1d = CausalConv1d(
            config,
            (key_heads, self.widths[0]),
            config.linear_conv_kernel_dim,
            tp_group=groups.tp,
            backend=self.backend,
        )
        self.A_log = new_split_vector(config, value_heads, LogUniform(1.0, 16.0), groups.tp)
        self.dt_bias = new_split_vector(config, value_heads, Constant(1.0), groups.tp)
        self.core_attention = DeltaRuleAttention(dk, dv, self.backend)
        norm = {"config": config, "hidden_size": dv, "eps": config.layernorm_epsilon}
        offer = {"backend": self.backend, "zero_centered": False}
        self.out_norm = build_module(submodules.out_norm, **norm, offer=offer)
        if groups.size("tp") > 1:  # each rank norms its own heads
            add_partial_gradient_axis("tp", self.out_norm)
        self.out_proj = build_output_projection(
            submodules.out_proj, config, value_heads * dv, groups.tp, self.backend, bias=False, name="out_proj"
        )
        self.attend_to_convolved = DiscardedResults(self.core_attention)
        self.project_gated = DiscardedResults(self.out_proj)

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Returns (output [t, h], None) for hidden states [t, h]. Under sequence parallelism both hold this rank's
        tokens; the state passes through this rank's heads of all tokens."""
        check_scanned_inputs(inputs, "gated_delta_net")
        tokens, ranks = inputs.tokens, group_size(self.cp_group)
        projected = self.in_proj(hidden_states)[0].view(tokens.seq_length, tokens.batch_size, self.key_heads, -1)
        # [s, b, key heads, ...] each
        mixed, gate, strength, fading = split_columns(projected, self.widths)
        if ranks > 1:  # gates stay with their rows
            mixed, strength, fading = start_to_heads([mixed, strength, fading], self.cp_group, ranks).wait()
            tokens = Tokens(tokens.row_length, tokens.batch_size, cu_seqlens=tokens.cu_seqlens)
        document = document_numbers(tokens, hidden_states.device)
        log_rate, bias = map(self._own, (self.A_log, self.dt_bias))
        if inputs.inference_context is None:
            convolved = self.attend_to_convolved.compute(partial(self._convolved, silu=True), mixed, document)
            output = self.attend_to_convolved(convolved, fading, strength, log_rate, bias, document)  # [s, b, v, dv]
        else:
            log_decay = log_decays(fading, log_rate, bias)
            output = continue_recurrence(
                inputs.inference_context,
                self.layer_number,
                mixed,
                self.conv1d.weight.shape[1],
                lambda rows: self._convolved(rows, None),
                lambda convolved, *seen: self.core_attention.advance(convolved, log_decay, strength, *seen),
            )
        if ranks > 1:
            output = start_to_rows(output, self.cp_group, ranks).wait()
        gated = self.project_gated.compute(self._gated, output, gate, hidden_states.dtype)
        result: tuple[Tensor, Tensor | None] = self.project_gated(gated.flatten(0, 1))
        return result

    def _gated(self, output: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns norm(output) * silu(gate) [s, b, v dv] for outputs [s, b, v, dv] and gates [s, b, key heads, ...]."""
        norm = self.out_norm
        if isinstance(norm, WrappedTorchNorm) and norm.can_gate:
            shape = (*gate.shape[:3], -1, output.shape[-1])
            gated = norm.gated(output.view(shape), gate.unflatten(-1, shape[3:])).flatten(2, 3)
        else:
            gated = norm(output) * F.silu(widened(gate.reshape(output.shape)))
        return gated.to(dtype).flatten(2)

    def _own(self, parameter: Tensor) -> Tensor:
        """Returns the part of a parameter that belongs to the heads of this context parallel rank."""
        if self.cp_group is None:  # no chunk of one part, whose backward would copy the gradient
            return parameter
        return parameter.chunk(group_size(self.cp_group))[group_rank(self.cp_group)]

    def _convolved(self, mixed: Tensor, document: Tensor | None, silu: bool = False) -> Tensor:
        return self.backend.recurrence.causal_conv(mixed, self._own(self.conv1d.weight), None, document, silu)


class DeltaRuleAttention(nn.Module):
    """The gated delta rule with queries and keys of length 1, without parameters. `--recompute-modules core_attn`
    recomputes this module."""

    def __init__(self, key_width: int, value_width: int, backend: Backend) -> None:
        super().__init__()
        self.key_width, self.value_width, self.backend = key_width, value_width, backend

    def forward(
        self,
        mixed: Tensor,
        fading: Tensor,
        strength: Tensor,
        log_rate: Tensor,
        bias: Tensor,
        document: Tensor | None,
    ) -> Tensor:
        """Returns the outputs [s, b, v, dv]. `ops.delta_rule.attention` describes the arguments."""
        widths = self.key_width, self.value_width
        return self.backend.recurrence.delta_rule_attention(mixed, fading, strength, log_rate, bias, widths, document)

    def advance(
        self, mixed: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor | None, ended: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs and the states [b, v, dk, dv] after the last token, from the states `state` before the
        first, default 0. Tokens where `ended` [s, b, 1] is True change no state. `log_decay` [s, b, v] are the
        logarithms of the decays."""
        heads, beta = split_heads_of_unit_length(mixed, (self.key_width, self.value_width)), betas(strength)
        if ended is not None:
            log_decay, beta = log_decay.masked_fill(ended, 0.0), beta.masked_fill(ended, 0.0)
        return gated_delta_rule(*heads, log_decay, beta, None, state)
