"""Dropout masks are functions of their place, the same by every implementation and for every cut of the batch."""

import pytest
import torch

from megatron.core.counter_rng import stream_key
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ops.attention import unfused as attention
from megatron.core.ops.dropout.dropout import (
    DropoutRngPosition,
    bias_dropout_add,
    dropout_tokens,
    keep_attention,
    keep_hidden,
)
from megatron.core.ops.dropout.dropout_cpu import keep_rows_compiled
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

CPU = torch.device("cpu")


def philox_word(counter: list[int], key: list[int], lane: int) -> int:
    """Philox-4x32-10 in Python integers (Salmon et al. 2011)."""
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (p1 >> 32) ^ counter[1] ^ key[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ counter[3] ^ key[1],
            p0 & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[lane]


def place(tokens: Tokens, layer: int = 3, site: str = "mlp") -> DropoutRngPosition:
    return DropoutRngPosition(dropout_tokens(tokens, CPU, keep_rows_compiled), layer, site)


def test_hidden_mask_is_the_stated_function() -> None:
    tokens = Tokens(5, 2, random=RngPosition(seed=11, iteration=6, first_sample=2**31))
    mask = keep_hidden(place(tokens), 10, 0.25)
    key = list(stream_key(11, "dropout/3/mlp"))
    for position, row, channel in [(0, 0, 0), (4, 1, 9), (2, 1, 6), (3, 0, 3)]:
        token = (2**31 + row) * 5 + position
        word = philox_word([token & 0xFFFFFFFF, channel // 4, 6, token >> 32], key, channel % 4)
        assert bool(mask[position * 2 + row, channel]) == (word >= 2**30)


def test_attention_is_dropped_also_at_a_probability_that_rounds_to_one() -> None:
    at = place(Tokens(1, 1, random=RngPosition(seed=11, iteration=6)), 2, "attention")
    kept = keep_attention(at, torch.tensor([[103]]), torch.arange(200)[None], torch.tensor([0]), 0.999999)
    assert not kept.any()


def test_attention_mask_is_the_stated_function() -> None:
    queries, keys = torch.tensor([[103, 104]]), torch.arange(101, 138)[None]
    at = place(Tokens(1, 1, random=RngPosition(seed=11, iteration=6)), 2, "attention")
    mask = keep_attention(at, queries, keys, torch.tensor([4, 5, 6]), 0.25)
    key = list(stream_key(11, "dropout/2/attention"))
    for head in range(3):
        for q in range(2):
            for k in range(37):
                group, column = divmod(101 + k, 32)
                places = [([103 + q, 4 * group + bit // 4, 6, 4 + head], bit % 4) for bit in range(16)]
                number = sum((philox_word(at, key, lane) >> column & 1) << bit for bit, (at, lane) in enumerate(places))
                assert bool(mask[0, head, q, k]) == (number >= 2**14)


def test_rate_and_independence() -> None:
    tokens = Tokens(64, 4, random=RngPosition(seed=1, iteration=0))
    mask = keep_hidden(place(tokens), 256, 0.1)
    rows = mask.float().mean(1)
    assert mask.float().mean().item() == pytest.approx(0.9, abs=0.005)
    assert 0.9 * 0.1 / 256 * 0.7 < rows.var().item() < 0.9 * 0.1 / 256 * 1.3  # as of independent draws
    masks = [
        mask,
        keep_hidden(place(tokens, layer=4), 256, 0.1),
        keep_hidden(place(tokens, site="self_attention"), 256, 0.1),
        keep_hidden(place(Tokens(64, 4, random=RngPosition(seed=2, iteration=0))), 256, 0.1),
        keep_hidden(place(Tokens(64, 4, random=RngPosition(seed=1, iteration=1))), 256, 0.1),
        keep_hidden(place(Tokens(64, 4, random=RngPosition(seed=1, iteration=0, first_sample=4))), 256, 0.1),
    ]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert (one == other).float().mean().item() == pytest.approx(0.9**2 + 0.1**2, abs=0.01)


def test_bias_dropout_add_gradients() -> None:
    at = place(Tokens(3, 2, random=RngPosition(1, 1)))
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(6, 7, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    bias = torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_()
    expected = r + (x + bias) * keep_hidden(at, 7, 0.3) / 0.7
    assert torch.allclose(bias_dropout_add(x, bias, r, 0.3, at), expected, rtol=1e-14)
    assert torch.autograd.gradcheck(lambda *t: bias_dropout_add(*t, 0.3, at), (x, bias, r))
    assert torch.equal(bias_dropout_add(x, bias, r, 0.3, None), r + (x + bias))


def test_megatron_lms_function_draws_for_itself() -> None:
    x, residual = torch.ones(4, 2, 50), torch.zeros(4, 2, 50)
    training, evaluating = (get_bias_dropout_add(training, fused=True) for training in (True, False))
    torch.manual_seed(1)
    first, second = training((x, None), residual, 0.5), training((x, None), residual, 0.5)
    assert set(first.unique().tolist()) == {0.0, 2.0} and not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(training((x, None), residual, 0.5), first)
    assert torch.equal(evaluating((x, None), residual, 0.5), x)


# ---------------------------------------------------------------------------------------------------------------------
# In a model


def build(**settings) -> GPTModel:
    settings = {"hidden_dropout": 0.2, "attention_dropout": 0.3, "num_query_groups": 2} | settings
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, fp64=True, **settings)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=37, max_sequence_length=16)


def batch(b: int = 3, s: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(37, (b, s + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def step(model: GPTModel, parts: list[tuple[torch.Tensor, torch.Tensor, Tokens]]) -> tuple[torch.Tensor, list]:
    model.zero_grad()
    losses = [model(ids, labels=labels, tokens=tokens) for ids, labels, tokens in parts]
    sum(loss.sum() for loss in losses).backward()
    return torch.cat([loss.reshape(-1) for loss in losses]), [p.grad for p in model.parameters()]


def close(ours: tuple[torch.Tensor, list], expected: tuple[torch.Tensor, list]) -> None:
    for a, b in zip([ours[0], *ours[1]], [expected[0], *expected[1]], strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_rows_alone_equal_the_batch() -> None:
    model, (ids, labels) = build(), batch()
    whole = step(model, [(ids, labels, Tokens(11, 3, random=RngPosition(5, 8, first_sample=6)))])
    rows = [
        (ids[i : i + 1], labels[i : i + 1], Tokens(11, 1, random=RngPosition(5, 8, first_sample=6 + i)))
        for i in range(3)
    ]
    close(step(model, rows), whole)
    elsewhere = step(model, [(ids, labels, Tokens(11, 3, random=RngPosition(5, 8, first_sample=7)))])
    assert (elsewhere[0] - whole[0]).abs().max() > 1e-3


def test_packed_samples_equal_the_batch() -> None:
    model, (ids, labels) = build(), batch()
    whole = step(model, [(ids, labels, Tokens(11, 3, random=RngPosition(5, 8, first_sample=6)))])
    flat = Tokens(
        33,
        1,
        cu_seqlens=torch.tensor([0, 11, 22, 33], dtype=torch.int32),
        max_seqlen=11,
        sample_length=11,
        random=RngPosition(5, 8, first_sample=6),
    )
    close(step(model, [(ids.reshape(1, -1), labels.reshape(1, -1), flat)]), whole)


def test_place_may_live_on_the_device() -> None:
    model, (ids, labels) = build(), batch()
    numbers = step(model, [(ids, labels, Tokens(11, 3, random=RngPosition(5, 8, 6)))])
    tensors = step(model, [(ids, labels, Tokens(11, 3, random=RngPosition(5, torch.tensor(8), torch.tensor(6))))])
    assert torch.equal(tensors[0], numbers[0])


def test_attention_in_blocks_of_queries_equals_attention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, labels) = build(), batch()
    part = [(ids, labels, Tokens(11, 3, random=RngPosition(5, 8)))]
    at_once = step(model, part)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 4 * 3 * 4 * 11)  # four queries a block
    close(step(model, part), at_once)


def test_evaluation_drops_nothing() -> None:
    model, (ids, _) = build(), batch()
    without = build(hidden_dropout=0.0, attention_dropout=0.0)
    random = Tokens(11, 3, random=RngPosition(5, 8))
    assert torch.equal(model.eval()(ids, tokens=random), without.eval()(ids))
    assert not torch.equal(model.train()(ids, tokens=random), without(ids))


def test_without_a_place_each_forward_draws_one_seed() -> None:
    model, (ids, _) = build(), batch()
    torch.manual_seed(3)
    first, second = model(ids), model(ids)
    torch.manual_seed(3)
    assert torch.equal(model(ids), first) and not torch.equal(first, second)


@pytest.mark.parametrize("settings", [{"attention_dropout": 0.0}, {"hidden_dropout": 0.0}])
def test_each_site_matters(settings: dict) -> None:
    model, (ids, _) = build(**settings), batch()
    random = Tokens(11, 3, random=RngPosition(5, 8))
    assert not torch.equal(model(ids, tokens=random), model.eval()(ids))
