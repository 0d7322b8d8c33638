"""Multi-token prediction of a language model: the tokens to predict, and their losses."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.context_parallel.mtp_shift import shifted_rows
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ops.attached_loss import attach_loss
from megatron.core.ops.precision import widened
from megatron.core.parameters import info_of
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.pipeline_parallel.stages import states_into_stages
from megatron.core.tokens import Tokens, position_ids
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_metrics import LayerMetrics
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.autograd_context import AutogradContext

Head = Callable[..., Tensor]
"""(hidden states [s, b, h], labels [b, s], trains_weight=True) -> loss of each token [s, b]."""


@dataclass(frozen=True)
class TokensAhead:
    """The token d positions after each token, for one depth d: [b, s]; 0 if the row or document ends before it."""

    ids: Tensor | None = None
    positions: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    embedded: Tensor | None = None
    """Embeddings [s, b, h] of `ids`."""

    def embed(self, embedding: LanguageModelEmbedding, inputs: LayerInputs, layer_number: int) -> "TokensAhead":
        """Returns the same tokens with their embeddings, if they have ids."""
        if self.ids is None:
            return self
        embedded = embedding.embed(self.ids, inputs, positions=self.positions, layer_number=layer_number)
        return dataclasses.replace(self, embedded=embedded)


def tokens_ahead(
    depths: int,
    tokens: Tokens,
    cp_group: Group,
    *,
    ids: Tensor | None,
    reads_ids: bool,
    reads_positions: bool,
    labels: Tensor | None,
    loss_mask: Tensor | None,
) -> list[TokensAhead]:
    """Returns the tokens 1 to `depths` positions ahead, depth by depth. One exchange among context parallel ranks.

    Ids, labels and mask are [b, s]. The function reads ids if `reads_ids` is set (UserError if they are None), and
    labels with their mask if they are given.
    """
    rows: dict[str, Tensor] = {}
    if reads_ids:
        if ids is None:
            raise UserError("a stage that predicts several tokens (mtp_num_layers) needs input_ids")
        rows["ids"] = ids
        if reads_positions:
            rows["positions"] = position_ids(tokens, ids.device).expand_as(ids)
    if labels is not None:
        rows["labels"] = labels
        rows["loss_mask"] = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
    found = shifted_rows(list(rows.values()), depths, tokens, cp_group)
    return [TokensAhead(**dict(zip(rows, ahead, strict=True))) for ahead in found]


def states_into_stage(
    config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None, predicts: bool
) -> int:
    """Returns the number of hidden states per token that a model chunk receives: 1 for the decoder, plus 1 per depth
    after the stage with prediction layers. Raises UserError if the chunk has prediction layers (`predicts`) and the
    config puts none on its stage, or the reverse."""
    stages = stage_map(config)
    stage = stages.stage_at(groups.rank("pp"), vp_stage or 0)
    if predicts != bool(stage.prediction_layers):
        raise UserError(
            f"mtp_block_spec is {'given' if predicts else 'missing'}, while mtp_num_layers {config.mtp_num_layers} "
            f"puts {stage.prediction_layers} layers on this stage; "
            "get_gpt_mtp_block_spec(config, spec, use_transformer_engine) returns the right one"
        )
    return states_into_stages(config, stages)[stage.index].decoder


def check_copies_have_groups(model: nn.Module, groups: ProcessGroupCollection) -> None:
    """Raises UserError if a copy of an embedding is not in the group over which its gradient is summed."""
    if groups.size("pp") == 1:
        return
    for parameter in model.parameters():
        info = info_of(parameter)
        if info.tied and groups.rank(info.tied_over) < 0:
            function = {"embd": "get_embedding_ranks", "pos_embd": "get_position_embedding_ranks"}[info.tied_over]
            raise UserError(
                f"{info.name} is also on this pipeline stage, for layers that predict several tokens "
                f"(mtp_num_layers), but the group {info.tied_over} does not have its rank: give "
                f"initialize_model_parallel({function}=...)"
            )


def without_gradient(tensor: Tensor) -> Tensor:
    """Returns the tensor; its gradient is zero. Unlike with `detach`, backward continues with zeros, so that every
    layout makes the same calls."""
    return _WithoutGradient.apply(tensor)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


class PredictionLoss(nn.Module):
    """The loss of one depth, reported as `mtp_{depth} loss`: the mean over unmasked tokens."""

    def __init__(self, config: TransformerConfig, depth: int) -> None:
        super().__init__()
        self.name = f"mtp_{depth} loss"
        self.metrics = LayerMetrics(config.num_layers + depth)

    def forward(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Returns the sum of the unmasked losses, in float32 at least, for losses and mask [s, b] of any types."""
        losses = widened(losses)  # a user's head may return bfloat16, which cannot count beyond 256
        total = (losses * mask.to(losses.dtype)).sum()
        self.metrics.add(self.name, total, mask.sum(dtype=torch.float64))
        return total


class PredictionLosses(nn.Module):
    """Adds to the model's loss the mean over depths of each depth's masked mean loss, times `mtp_loss_scaling_factor`.

    The mean of a micro-batch is over its tokens on all context parallel ranks. With a loss per token it is the sum:
    gradients are divided by the tokens of the global batch when they are finalized.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        depths = config.mtp_num_layers or 0
        self.weight = (config.mtp_loss_scaling_factor or 0.0) / depths
        self.is_per_token = config.calculate_per_token_loss
        self.depths = nn.ModuleList(PredictionLoss(config, depth) for depth in range(1, depths + 1))

    def forward(
        self,
        carrier: Tensor,
        hidden: Sequence[Tensor],
        ahead: Sequence[TokensAhead],
        head: Head,
        cp_group: Group,
        scale: Tensor | None,
    ) -> Tensor:
        """Returns `carrier` with the losses of all depths attached. `hidden` are the hidden states [s, b, h] of each
        depth, `ahead` their labels and masks. The gradient of these losses is multiplied by `scale` (None: 1)."""
        masks = [one.loss_mask for one in ahead if one.loss_mask is not None]
        divisors = torch.ones(len(masks), dtype=torch.float64, device=carrier.device)
        if not self.is_per_token:
            divisors = all_reduce(torch.stack([mask.sum(dtype=torch.float64) for mask in masks]), cp_group).clamp(min=1)
        # Attached one after the other, so that backward frees the logits of one head before it starts the next.
        for depth, module in enumerate(self.depths):
            labels = ahead[depth].labels
            assert labels is not None
            losses = head(hidden[depth], labels)  # [s, b]
            total = module(losses, masks[depth].t())
            carrier = attach_loss(carrier, total * (self.weight / divisors[depth]).to(total.dtype), scale)
        return carrier


class ChunkPredictions:
    """What one chunk of a model does for multi-token prediction: it runs the prediction layers (`block`), computes the
    losses (`losses`), both, or neither.

    Not a module: the model registers `block` and `losses` under its own names. `spec` describes the prediction layers,
    None in a chunk without them. Raises UserError if the config puts them elsewhere.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        spec: ModuleSpec | None,
        vp_stage: int | None,
        *,
        layers_before: int,
        has_head: bool,
    ) -> None:
        self.config, self.groups, self.has_head = config, groups, has_head
        self.states_in = states_into_stage(config, groups, vp_stage, spec is not None)
        """Number of hidden states per token that the chunk receives."""
        self.block: MultiTokenPredictionBlock | None = None
        if spec is not None:
            self.block = MultiTokenPredictionBlock(config, spec, vp_stage, groups, layers_before=layers_before)
        self.losses = PredictionLosses(config) if has_head and config.mtp_num_layers else None

    def look_ahead(
        self,
        embedding: LanguageModelEmbedding | None,
        ids: Tensor | None,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        inputs: LayerInputs,
        *,
        training: bool,
    ) -> Sequence[TokensAhead]:
        """Returns the tokens that this chunk reads, depth by depth, with their embeddings.

        Returns an empty list if the chunk predicts no tokens, or if the forward computes no loss. A chunk that sends
        its predictions to another stage always reads them. Tokens are embedded before the decoder runs, so that a
        sharded embedding is gathered once.
        """
        trains = labels is not None and training and torch.is_grad_enabled()
        reads_ids = self.block is not None and (trains or not self.has_head)
        reads_labels = self.losses is not None and trains
        if inputs.inference_context is not None or not (reads_ids or reads_labels):
            return ()
        ahead = tokens_ahead(
            self.config.mtp_num_layers or 0,
            inputs.tokens,
            self.groups.cp,
            ids=ids if reads_ids else None,
            reads_ids=reads_ids,
            reads_positions=reads_ids and embedding is not None and embedding.position_embeddings is not None,
            labels=labels if reads_labels else None,
            loss_mask=loss_mask,
        )
        if embedding is None:
            return ahead
        first = self.config.num_layers + 1
        return [one.embed(embedding, inputs, layer) for layer, one in enumerate(ahead, first)]

    def predict(self, hidden: Tensor, ahead: Sequence[TokensAhead], inputs: LayerInputs) -> list[Tensor]:
        """Returns the decoder's hidden states [s, b, h], followed by those of each further depth if this chunk has the
        prediction layers."""
        embedded = [one.embedded for one in ahead if one.embedded is not None]
        if self.block is None or not embedded:
            return [hidden]
        read = hidden
        if self.config.mtp_detach_heads:
            read, embedded = without_gradient(hidden), [without_gradient(one) for one in embedded]
        return [hidden, *self.block(read, embedded, inputs)]

    def attach_losses(
        self, states: Sequence[Tensor], ahead: Sequence[TokensAhead], head: Head, inputs: LayerInputs
    ) -> Tensor:
        """Returns the decoder's hidden states, with the losses of all depths attached if this forward computes them.
        `states` are those of `predict`, here or on another stage."""
        if self.states_in > 1:  # sent by the stage that predicts, in one message
            states = states[0].to(self.config.params_dtype).chunk(self.states_in)
        hidden, *predicted = states
        if self.losses is None or not ahead:
            return hidden
        if self.config.mtp_detach_heads:
            head = partial(head, trains_weight=False)
        return self.losses(hidden, predicted, ahead, head, self.groups.cp, inputs.auxiliary_scale)
