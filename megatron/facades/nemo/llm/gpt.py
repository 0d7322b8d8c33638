"""`GPTModel` of NeMo, and the steps of its micro-batches."""

from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.context_parallel import sequence_part
from megatron.core.context_parallel.batches import get_batch_on_this_cp_rank
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.tokens import Tokens
from megatron.core.utils.rendezvous import local_device
from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.bases import LightningModule, with_lightning
from megatron.facades.nemo.lightning.loss import MaskedTokenLossReduction
from megatron.facades.nemo.llm.config import GPTConfig
from megatron.facades.pretrain import gpt_entry_script
from megatron.training.data.batch import Batch
from megatron.training.providers import Context, Stage

_FIELDS = tuple(Batch.__annotations__)


def gpt_data_step(dataloader_iter: Foreign, use_mtp: bool = False) -> dict[str, Foreign]:
    """Returns the next micro-batch on this rank's device, cut to its context parallel part: tokens, labels, loss_mask,
    position_ids, attention_mask, and `token_record`, which describes the tokens and their place in the run."""
    found = next(dataloader_iter)
    given = found[0] if isinstance(found, tuple) and len(found) == 3 else found
    batch = Batch(**{name: given[name] for name in _FIELDS if name in given}).to(local_device(), non_blocking=True)
    part = sequence_part(groups_or_default(None))
    sample_length = batch.tokens.shape[1]
    batch = (batch if batch.cu_seqlens is None else batch.laid_end_to_end()).part(part)
    rows, length = batch.tokens.shape
    record = Tokens(
        seq_length=length,
        batch_size=rows,
        part=part,
        positions=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        sample_length=sample_length,
        random=getattr(dataloader_iter, "rng_position", None),
    )
    return {**vars(batch), "token_record": record}


def gpt_forward_step(model: nn.Module, batch: dict[str, Foreign]) -> Tensor:
    """Returns the loss of each token [b, s] of a micro-batch, or logits for a batch without labels."""
    more = {name: batch[name] for name in ("loss_mask",) if batch.get("token_record") is not None}
    losses: Tensor = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch.get("labels"),
        packed_seq_params=batch.get("packed_seq_params"),
        **({"tokens": batch["token_record"]} if more else {}),
        **more,
    )
    return losses


def get_batch_on_this_context_parallel_rank(batch: dict[str, object]) -> dict[str, object]:
    """Cuts a batch, tensors [b, s, ...] of whole rows, to this context parallel rank's part."""
    return get_batch_on_this_cp_rank(batch)


class GPTModel(LightningModule):
    """A GPT of NeMo: a config, an optimizer (`optim`) and a tokenizer. The run builds its network, as `module`."""

    def __new__(cls, *args: object, **kwargs: object) -> "GPTModel":
        """Makes it an instance of Lightning's LightningModule too if Lightning has been imported."""
        made: GPTModel = object.__new__(with_lightning(cls, "core", "LightningModule"))
        return made

    def __init__(
        self,
        config: GPTConfig,
        optim: Foreign = None,
        tokenizer: Foreign = None,
        model_transform: Callable[..., object] | None = None,
        model_context_managers: Foreign = (),
    ) -> None:
        for name, value in {
            "model_transform": model_transform,
            "model_context_managers": model_context_managers,
        }.items():
            if value:
                raise UserError(
                    f"{type(self).__name__}({name}=...): leave it out; change the network in configure_model"
                )
        super().__init__()
        self.config, self.optim, self.tokenizer = config, optim, tokenizer
        self.module: nn.Module | None = None

    def build_network(self, context: Context, stage: Stage) -> None:
        """Makes the part of the network that a stage holds, as pretrain_gpt.py does."""
        self.module = gpt_entry_script().build_model(context, stage)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        decoder_input: Tensor | None = None,
        inference_context: Foreign = None,
        packed_seq_params: Foreign = None,
        **more: Foreign,
    ) -> Tensor:
        """Calls the network: losses [b, s] with labels, logits [b, s, vocabulary] without."""
        assert self.module is not None, "the network is made when a trainer runs the model"
        output: Tensor = self.module(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            labels=labels,
            decoder_input=decoder_input,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
            **more,
        )
        return output

    def data_step(self, dataloader_iter: Foreign) -> Foreign:
        """Returns the next micro-batch: the config's `data_step_fn`, or `gpt_data_step`."""
        return (self.config.data_step_fn or gpt_data_step)(dataloader_iter)

    def forward_step(self, batch: Foreign) -> Tensor:
        """Runs a micro-batch: the config's `forward_step_fn`, or `gpt_forward_step`."""
        return (self.config.forward_step_fn or gpt_forward_step)(self, batch)

    def training_step(self, batch: Foreign, batch_idx: int | None = None) -> Tensor:
        """Runs a micro-batch of training, of an evaluation or of a test."""
        return self.forward_step(batch)

    validation_step = test_step = training_step

    def loss_reduction(self) -> MaskedTokenLossReduction:
        """Returns the loss of unmasked tokens."""
        return MaskedTokenLossReduction()

    @property
    def training_loss_reduction(self) -> MaskedTokenLossReduction:
        """The loss of training."""
        return MaskedTokenLossReduction()

    @property
    def validation_loss_reduction(self) -> MaskedTokenLossReduction:
        """The loss of evaluations."""
        return MaskedTokenLossReduction(validation_step=True)
