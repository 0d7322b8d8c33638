"""Both heads of BERT against two models of `transformers`, in float64, with padded rows: MegatronBert, whose norms come
first, and the first BERT, whose norms come after each residual."""

from typing import Any

import pytest
import torch
import transformers
from support.bert_weights import bert_weights
from support.tiny_models import tiny_config
from torch import Tensor

from megatron.core.models.bert import BertModel
from megatron.core.models.bert.bert_layer_specs import get_bert_encoder_block_spec
from megatron.core.transformer.enums import AttnBackend

LAYERS, HEADS, VOCABULARY, LENGTH = 3, 4, 61, 9


def theirs(norms_before: bool) -> torch.nn.Module:
    """A small random model, norms and biases too."""
    kind = "MegatronBert" if norms_before else "Bert"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForPreTraining")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.3
    return model


def ours(norms_before: bool, **settings: Any) -> BertModel:
    placement = {} if norms_before else {"norm_placement": "post_residual", "embedding_norm": True}
    sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": HEADS, "ffn_hidden_size": 48}
    config = tiny_config(**sizes, layernorm_epsilon=1e-12, **placement, **settings)
    layers = get_bert_encoder_block_spec(config, pp_rank=0)
    return BertModel(config, 2, layers, VOCABULARY, LENGTH, share_embeddings_and_output_weights=True).eval()


def text() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "input_ids": torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator),  # 0 has no gradient there
        "token_type_ids": (torch.arange(LENGTH) > 4).long().expand(3, -1),
        "attention_mask": (torch.arange(LENGTH) < torch.tensor([[9], [6], [2]])).long(),
    }


@pytest.mark.parametrize("norms_before", [True, False], ids=["MegatronBert", "Bert"])
@pytest.mark.parametrize("attention_backend", ["auto", "unfused"])
def test_logits_and_gradients(norms_before: bool, attention_backend: str) -> None:
    oracle, batch = theirs(norms_before), text()
    model = ours(norms_before, attention_backend=AttnBackend[attention_backend])
    model.load_state_dict(bert_weights(oracle.state_dict(), LAYERS, HEADS, norms_before))
    inputs = (batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    logits, in_order = model(*inputs)
    expected = oracle(**batch)
    real = batch["attention_mask"].bool()
    assert (logits - expected.prediction_logits)[real].abs().max() < 1e-11
    assert (in_order - expected.seq_relationship_logits).abs().max() < 1e-11

    labels = torch.where(torch.arange(LENGTH) % 3 == 1, batch["input_ids"], -1).where(real, -1)
    losses, in_order = model(*inputs, lm_labels=labels)
    masked, order = (labels >= 0).double(), torch.tensor([0, 1, 1])
    loss = (losses * masked).sum() / masked.sum() + torch.nn.functional.cross_entropy(in_order, order)
    loss.backward()
    wanted = oracle(**batch, labels=labels.where(labels >= 0, -100), next_sentence_label=order)
    wanted.loss.backward()
    assert abs(loss - wanted.loss) < 1e-12
    gradients = bert_weights({name: p.grad for name, p in oracle.named_parameters()}, LAYERS, HEADS, norms_before)
    found = dict(model.named_parameters())
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name].grad - gradient).abs().max() < 1e-11, name
