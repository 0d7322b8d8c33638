"""GPT over two tensor parallel ranks against one, in float64: what tests/parity has no model of, and logits."""

from typing import Any

import pytest
import torch
from support.boxes import error, fill, gradient_errors, part_of, whole_gradients, whole_values
from support.pool import Pool
from support.tiny_models import OwnNorm, randomize, tiny_config

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.tokens import RngPosition, Tokens

TOLERANCE = 1e-11
MODEL = {"vocab_size": 37, "max_sequence_length": 16, "share_embeddings_and_output_weights": True}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def build(
    settings: dict, model: dict, groups: ProcessGroupCollection | None = None, norm: type | None = None, **layout: Any
) -> GPTModel:
    config = tiny_config(hidden_dropout=0.2, attention_dropout=0.2, **settings, **layout)
    spec = gpt_layer_spec_of(config, 1)
    if norm is not None:
        parts = spec.submodules
        attention = parts.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = norm
    return GPTModel(config, spec, pg_collection=groups, **MODEL | model)


def batch() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(37, (2, 13), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 3] = -100
    return ids[:, :-1], labels, torch.rand(2, 12, dtype=torch.float64, generator=generator)


def run(model: GPTModel) -> torch.Tensor:
    """Losses, with gradients of their weighted sum left in the model; dropout as at one place of a run."""
    ids, labels, weight = batch()
    tokens = Tokens(ids.shape[1], ids.shape[0], random=RngPosition(7, 3, 5))
    loss = model(ids, labels=labels, tokens=tokens)
    (loss * weight).sum().backward()
    return loss.detach()


def on_a_rank(
    settings: dict, keywords: dict, sequence_parallel: bool, expected: dict, norm: type | None = None
) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), rank)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    model = build(settings, keywords, groups, norm, **layout)
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
    own = model(batch()[0])  # this rank's part of the vocabulary, and padding
    wanted = expected["logits"][..., own.shape[-1] * rank :][..., : own.shape[-1]]
    errors["own logits"] = error(own[..., : wanted.shape[-1]].detach(), wanted)
    assert (own[..., wanted.shape[-1] :] == -torch.inf).all()
    own[..., : wanted.shape[-1]].sum().backward()
    return errors


def prepared(settings: dict, keywords: dict, norm: type | None = None) -> dict[str, Any]:
    """What one rank has and computes."""
    whole = build(settings, keywords, norm=norm)
    expected: dict[str, Any] = {"initial": whole_values(whole)}
    randomize(whole)
    expected |= {"values": whole_values(whole), "loss": run(whole), "gradients": whole_gradients(whole)}
    whole.eval()
    return expected | {"logits": whole(batch()[0]).detach()}


def compare(pool: Pool, settings: dict, keywords: dict, sequence_parallel: bool, norm: type | None = None) -> None:
    expected = prepared(settings, keywords, norm)
    results = pool.run(on_a_rank, 2, settings, keywords, sequence_parallel, expected, norm)
    for rank, errors in enumerate(results):
        wrong = {name: value for name, value in errors.items() if not value < TOLERANCE}
        assert len(errors) > 10 and not wrong, (rank, wrong)


def test_an_embedding_that_is_not_scattered(pool: Pool) -> None:
    compare(pool, {}, {"scatter_embedding_sequence_parallel": False}, sequence_parallel=True)


def test_norms_of_a_user_are_summed_too(pool: Pool) -> None:
    settings = {"qk_layernorm": True, "num_query_groups": 2, "softmax_type": "learnable"}
    for sequence_parallel in (False, True):
        compare(pool, settings, {"position_embedding_type": "rope"}, sequence_parallel, OwnNorm)


def test_refusals_name_what_works() -> None:
    model = build({}, {}, ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), 1), **SP2)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(UserError, match=r"tokens in a row: 5 is not divisible by 2 tensor parallel ranks; use 4 or 6"):
        model(ids)
    with pytest.raises(UserError, match=r"sequence_parallel does not go with an inference_context"):
        model(ids, inference_context=object())
    groups = ProcessGroupCollection.from_grid(RankGrid(3, tensor=3), 1)
    with pytest.raises(
        UserError, match=r"num_attention_heads: 4 is not divisible by 3 tensor parallel ranks; use 3 or 6"
    ):
        build({}, {}, groups)
