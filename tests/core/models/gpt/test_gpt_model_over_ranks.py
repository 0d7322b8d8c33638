"""GPT whose layers are split over tensor parallel ranks, against one rank, in float64: losses, logits, gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.boxes import error, fill, gradient_errors, part_of, whole_gradients, whole_values
from support.pool import Pool

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.core.tokens import RandomPlace, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

TOLERANCE = 1e-11
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 24,
}
ROPE = {"position_embedding_type": "rope"}
UNTIED = {"share_embeddings_and_output_weights": False}

# name: (tensor parallel ranks, settings of the config, keywords of the model)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "biases, learned positions, tied": (2, {}, {}),
    "untied, padded vocabulary": (2, {}, {**UNTIED, "vocab_padding_multiple": 16}),
    "llama, GQA": (2, {**LLAMA, "num_query_groups": 2}, {**ROPE, **UNTIED}),
    "qk norms, learnable sinks": (
        2,
        {"qk_layernorm": True, "num_query_groups": 2, "softmax_type": "learnable"},
        {**ROPE},
    ),
    "MQA": (2, {"num_query_groups": 1, "qk_layernorm": True}, ROPE),
    "four ranks, two groups": (4, {"num_query_groups": 2, "qk_layernorm": True}, {**ROPE, **UNTIED}),
    "four ranks, MQA, no biases": (4, {**LLAMA, "num_query_groups": 1}, ROPE),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def build(settings: dict, model: dict, groups: ProcessGroupCollection | None = None, **layout) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.2,
        attention_dropout=0.2,
        fp64=True,
        **settings,
        **layout,
    )
    keywords = {"vocab_size": 37, "max_sequence_length": 16, "share_embeddings_and_output_weights": True} | model
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    return GPTModel(config, spec, pg_collection=groups, **keywords)


def batch(s: int = 12, b: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(37, (b, s + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 3] = -100
    return ids[:, :-1], labels, torch.rand(b, s, dtype=torch.float64, generator=generator)


def run(model: GPTModel) -> torch.Tensor:
    """Losses, with gradients of their weighted sum left in the model; dropout as at one place of a run."""
    ids, labels, weight = batch()
    tokens = Tokens(ids.shape[1], ids.shape[0], random=RandomPlace(7, 3, 5))
    loss = model(ids, labels=labels, tokens=tokens)
    (loss * weight).sum().backward()
    return loss.detach()


def on_a_rank(settings: dict, keywords: dict, size: int, sequence_parallel: bool, expected: dict) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(size, tensor=size), rank)
    layout = {"tensor_model_parallel_size": size, "sequence_parallel": sequence_parallel}
    model = build(settings, keywords, groups, **layout)
    for parameter in model.parameters():
        initial = parameter.detach().view(-1)[: parameter.info.box.numel]
        assert torch.equal(initial, part_of(expected["initial"][parameter.info.name], parameter).reshape(-1))
    errors = {}
    fill(model, expected["values"])
    errors["loss"] = error(run(model), expected["loss"])
    errors |= gradient_errors(model, expected["gradients"], groups.tp)
    model.eval()
    logits = model(batch()[0], runtime_gather_output=True)
    errors["logits"] = error(logits.detach(), expected["logits"])
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_rank(case: str, sequence_parallel: bool, pool: Pool) -> None:
    size, settings, keywords = CASES[case]
    torch.manual_seed(0)
    whole = build(settings, keywords)
    expected = {"initial": whole_values(whole)}
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    expected |= {"values": whole_values(whole), "loss": run(whole), "gradients": whole_gradients(whole)}
    whole.eval()
    expected["logits"] = whole(batch()[0]).detach()
    for rank, errors in enumerate(pool.run(on_a_rank, size, settings, keywords, size, sequence_parallel, expected)):
        wrong = {name: value for name, value in errors.items() if not value < TOLERANCE}
        assert not wrong, (rank, wrong)
