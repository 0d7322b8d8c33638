"""Forward passes of a decoder that is split over ranks: tensor, pipeline and expert parallelism."""

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, broadcast, start_receive, start_send
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.precision import widened
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import InferenceContext
from megatron.core.transformer.transformer_config import TransformerConfig


class LayoutForward:
    """Computes logits with the chunk of a GPTModel or HybridModel that this rank holds. All ranks call it together with
    equal tokens; data parallel ranks, which expert parallelism may need, compute the same tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        config, groups = getattr(model, "config", None), getattr(model, "pg_collection", None)
        assert isinstance(config, TransformerConfig) and isinstance(groups, ProcessGroupCollection)
        if groups.size("cp") > 1 or config.virtual_pipeline_model_parallel_size not in (None, 1):
            raise UserError(
                "text is generated with tensor, pipeline and expert parallelism; set context_parallel_size 1, and no "
                "virtual pipeline stages"
            )
        self.config, self.groups = config, groups
        self.device = next(model.parameters()).device
        self.vocab_size = int(getattr(model, "vocab_size", 0))
        self.masks_padding = bool(config.num_moe_experts) and config.moe_expert_capacity_factor is not None

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: InferenceContext,
        *,
        num_predicted: int = 1,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [b, n, V] in float32 at least, equal on all ranks of a pipeline.

        Tokens and positions are int64 [b, s]. The context selects the n = `num_predicted` tokens of each row whose
        successors are predicted. `padding` (bool [b, s]) marks tokens that experts with a capacity must not count.
        Collective.
        """
        rows, length = tokens.shape
        stages, stage, group = self.groups.size("pp"), self.groups.rank("pp"), self.groups.pp
        ranks = self.groups.ranks("pp")
        if stage > 0:
            self._receive_states(length, rows, ranks[stage - 1], group)
        more = {"padding_mask": padding} if padding is not None and self.masks_padding else {}
        found: Tensor = self.model(
            tokens if stage == 0 else None,
            positions,
            tokens=Tokens(length, rows, positions=positions),
            inference_context=context,
            **more,
        )
        if stages == 1:
            return widened(found[..., : self.vocab_size])
        sent = None
        if stage < stages - 1:
            sent = start_send(found.to(self.config.pipeline_dtype).contiguous(), ranks[stage + 1], group)
            logits = torch.empty(rows, num_predicted, self.vocab_size, dtype=self._wide, device=self.device)
        else:
            logits = found[..., : self.vocab_size].to(self._wide).contiguous()
        broadcast(logits, group, source=stages - 1)
        if sent is not None:
            sent.wait()
        return logits

    def agree(self, chosen: Tensor) -> Tensor:
        """Returns the tokens that the first data and tensor parallel rank chose, because logits of other ranks may
        differ by rounding. Collective."""
        for name in ("dp_cp", "tp"):
            if self.groups.size(name) > 1:
                broadcast(chosen, getattr(self.groups, name))
        return chosen

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.config.params_dtype, torch.float32)

    def _receive_states(self, length: int, rows: int, source: int, group: Group) -> None:
        shape, dtype = (length, rows, self.config.hidden_size), self.config.pipeline_dtype
        hidden = start_receive(torch.empty(shape, dtype=dtype, device=self.device), source, group).wait()
        self.model.set_input_tensor(hidden)  # type: ignore[operator]
