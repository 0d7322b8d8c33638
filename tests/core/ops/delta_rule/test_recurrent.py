"""The definition of the gated delta rule against closed forms."""

import torch

from megatron.core.ops.delta_rule.recurrent import gated_delta_rule_recurrent


def test_an_exact_key_returns_the_last_value_that_was_written() -> None:
    # With unit keys and beta 1, a token overwrites what was stored under its key.
    key = torch.eye(3, dtype=torch.float64)[[0, 1, 0, 2]].view(4, 1, 1, 3)
    value = torch.arange(8.0, dtype=torch.float64).view(4, 1, 1, 2)
    query = torch.eye(3, dtype=torch.float64)[[0, 0, 0, 1]].view(4, 1, 1, 3)
    one, none = torch.ones(4, 1, 1, dtype=torch.float64), torch.zeros(4, 1, 1, dtype=torch.float64)
    output, state = gated_delta_rule_recurrent(query, key, value, none, one)
    assert output.view(4, 2).tolist() == [[0, 1], [0, 1], [4, 5], [2, 3]]
    assert state.view(3, 2).tolist() == [[4, 5], [2, 3], [6, 7]]


def test_without_corrections_it_is_linear_attention_with_decay() -> None:
    # Orthogonal keys: nothing is known of a new key, so outputs are decayed sums of scores times values.
    key = torch.eye(4, dtype=torch.float64).view(4, 1, 1, 4)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(4, 1, 1, 4, generator=generator, dtype=torch.float64)
    value = torch.randn(4, 1, 2, 3, generator=generator, dtype=torch.float64)
    decay = -torch.rand(4, 1, 2, generator=generator, dtype=torch.float64)
    beta = torch.rand(4, 1, 2, generator=generator, dtype=torch.float64)
    output, _ = gated_delta_rule_recurrent(query, key, value, decay, beta)
    total = decay.cumsum(0)
    for head in range(2):
        faded = (total[:, 0, head, None] - total[None, :, 0, head]).exp().tril()
        scores = query.view(4, 4) @ key.view(4, 4).T * faded * beta[:, 0, head]
        torch.testing.assert_close(output[:, 0, head], scores @ value[:, 0, head], rtol=1e-13, atol=1e-13)


def test_a_document_begins_without_a_state() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(5, 1, 1, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    decay, beta = -torch.ones(5, 1, 1, dtype=torch.float64), torch.full((5, 1, 1), 0.5, dtype=torch.float64)
    document = torch.tensor([0, 0, 1, 1, 1])
    output, state = gated_delta_rule_recurrent(query, key, value, decay, beta, document)
    alone, last = gated_delta_rule_recurrent(query[2:], key[2:], value[2:], decay[2:], beta[2:])
    assert torch.equal(output[2:], alone) and torch.equal(state, last)
