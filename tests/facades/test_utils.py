"""Megatron-LM's small functions, against plain loops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_inputs import is_plain_causal
from megatron.facades import parallel_state, utils
from megatron.training.data.batch import collate_gpt

EOD, PAD = 9, 7
DATA = torch.tensor([[1, EOD, 2, 3, EOD, 4], [EOD, EOD, 5, PAD, 6, EOD], [1, 2, 3, 4, 5, 6]])


def by_hand(reset_positions: bool, reset_mask: bool, eod: bool, pad: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, length = DATA.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    loss, positions = torch.ones(rows, length), torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        document, place = [], []
        for index in range(length):
            new = index > 0 and DATA[row, index - 1] == EOD
            document.append(document[-1] + new if document else 0)
            place.append(0 if new and reset_positions else place[-1] + 1 if place else 0)
            if (eod and DATA[row, index] == EOD) or (pad and DATA[row, index] == PAD):
                loss[row, index] = 0.0
        positions[row] = torch.tensor(place)
        for query in range(length):
            for key in range(length):
                apart = reset_mask and document[query] != document[key]
                mask[row, 0, query, key] = key > query or apart
    return (mask if reset_mask else mask[:1]), loss, positions


@pytest.mark.parametrize("flags", [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c, d in ((0, 0), (1, 0), (1, 1))])
def test_masks_and_positions(flags):
    found = utils.get_ltor_masks_and_position_ids(DATA, EOD, PAD, *map(bool, flags))
    for ours, expected in zip(found, by_hand(*map(bool, flags)), strict=True):
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


def test_a_batch_of_dictionaries_or_of_ours():
    fields = {name: torch.arange(6) for name in ("tokens", "labels", "position_ids")} | {"loss_mask": torch.ones(6)}
    found = utils.get_batch_on_this_tp_rank(iter([{**fields, "more": 1}]))
    assert list(found) == ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
    assert found["attention_mask"] is None and torch.equal(found["tokens"], fields["tokens"])
    assert utils.get_batch_on_this_cp_rank(found) is found


LATER = torch.ones(4, 4, dtype=torch.bool).triu(diagonal=1).expand(2, 1, 4, 4)


@pytest.mark.parametrize("other", [(1, 0, 3, 0), (0, 0, 0, 1)])
def test_a_mask_of_later_tokens_alone_says_so(other):
    """A causal layer need not read it, unless the script writes into it."""
    item = {name: torch.zeros(2, 4) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    mask = utils.get_batch_on_this_tp_rank(iter([{**item, "attention_mask": LATER.clone()}]))["attention_mask"]
    assert torch.equal(mask, LATER) and is_plain_causal(mask) and not is_plain_causal(mask | mask)
    mask[0, 0, 2, 0:1] = True
    assert not is_plain_causal(mask)
    special = LATER.clone()
    special[other] ^= True
    mask = utils.get_batch_on_this_tp_rank(iter([{**item, "attention_mask": special}]))["attention_mask"]
    assert torch.equal(mask, special) and not is_plain_causal(mask)


def test_boundaries_of_documents_become_a_mask():
    rows = [(0, 2, 5, 6, 6, 6, 6), (0, 1, 2, 6, 6, 6, 6), (0, 6, 6, 6, 6, 6, 6)]
    items = [
        dict.fromkeys(("tokens", "labels", "position_ids"), DATA[i])
        | {"loss_mask": torch.ones(6), "cu_seqlens": torch.tensor(row, dtype=torch.int32), "max_seqlen": 6}
        for i, row in enumerate(rows)
    ]
    found = utils.get_batch_on_this_tp_rank(iter([collate_gpt(items)]))  # type: ignore[list-item]
    assert torch.equal(found["attention_mask"], by_hand(False, True, False, False)[0])


def test_unwrapping():
    inner = SmallModel()
    wrapped = DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)
    assert utils.unwrap_model(wrapped) is inner and utils.unwrap_model([wrapped, inner]) == [inner, inner]
    assert utils.unwrap_model(wrapped, torch.nn.Linear) is wrapped


def test_norm_of_weights():
    inner = SmallModel(padded=3)
    expected = sum(float(parameter.detach().square().sum()) for parameter in inner.parameters()) ** 0.5
    assert utils.calc_params_l2_norm(inner) == pytest.approx(expected, rel=1e-12)
    wrapped = DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)
    assert utils.calc_params_l2_norm([wrapped]) == pytest.approx(expected, rel=1e-12)


def parts_on_rank() -> dict[str, Tensor | None]:
    """TP 2 x CP 2; what the second tensor parallel rank reads is not what it gets, and that of the last has nothing."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    rank = torch.distributed.get_rank()
    fields = {"tokens": DATA[:, :4] + rank % 2, "labels": DATA[:, 2:] + rank % 2, "loss_mask": torch.ones(3, 4) / 3}
    batch = {
        **fields,
        "position_ids": torch.arange(4).expand(3, 4),
        "attention_mask": torch.eye(4)[None, None] > rank % 2,
    }
    plain = {**batch, "attention_mask": LATER if rank % 2 == 0 else batch["attention_mask"]}
    data = None if rank == 3 else iter([batch, plain])
    found = utils.get_batch_on_this_cp_rank({**utils.get_batch_on_this_tp_rank(data), "cu_seqlens": torch.arange(5)})
    mask = utils.get_batch_on_this_tp_rank(data)["attention_mask"]
    assert mask is not None and is_plain_causal(mask) and torch.equal(mask, LATER)
    parallel_state.destroy_model_parallel()
    return found


def test_parts_of_a_batch_on_ranks():
    for rank, found in enumerate(run_on_ranks(parts_on_rank, 4)):
        held = [0, 3] if rank < 2 else [1, 2]
        assert torch.equal(found["tokens"], DATA[:, :4][:, held])
        assert torch.equal(found["labels"], DATA[:, 2:][:, held])
        assert torch.equal(found["loss_mask"], torch.ones(3, 2) / 3)
        assert found["position_ids"].tolist() == [held] * 3
        assert torch.equal(found["attention_mask"], (torch.eye(4) > 0)[None, None, held])
        assert found["cu_seqlens"].tolist() == [0, 1, 2, 3, 4]


def on_ranks() -> tuple[list[float], bool]:
    parallel_state.initialize_model_parallel()
    rank = torch.distributed.get_rank()
    utils.print_rank_0("never seen by the test")
    mean = utils.average_losses_across_data_parallel_group([torch.tensor(1.0 + rank), torch.tensor([4.0 * rank])])
    return mean.tolist(), utils.is_last_rank()


def test_means_over_ranks():
    assert run_on_ranks(on_ranks, 2) == [([1.5, 2.0], False), ([1.5, 2.0], True)]


def test_printing_in_one_process(capsys: Any):
    utils.print_rank_0("one")
    utils.print_rank_last("two")
    utils.print_rank_0("three", rank=1)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_blends_of_flags(tmp_path):
    listed = tmp_path / "data.txt"
    listed.write_text("0.3 a 0.7 b")
    of_splits = ("per_split_data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    none = dict.fromkeys(("data_path", "data_args_path", *of_splits))
    assert utils.get_blend_and_blend_per_split(SimpleNamespace(**none)) == (None, None)
    found = utils.get_blend_and_blend_per_split(SimpleNamespace(**none | {"data_args_path": str(listed)}))
    assert found == ((["a", "b"], [0.3, 0.7]), None)
    found = utils.get_blend_and_blend_per_split(SimpleNamespace(**none | {"valid_data_path": ["v"]}))
    assert found == (None, [None, (["v"], None), None])


def test_the_ends_of_a_pipeline():
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    assert utils.is_first_or_last_pipeline_stage(None) and utils.is_first_or_last_pipeline_stage(0)
    parallel_state.destroy_model_parallel()


def test_a_script_of_release_0_16_gets_the_keys_of_packing():
    item = {name: torch.zeros(1, 4) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    assert len(utils.get_batch_on_this_tp_rank(iter([item]))) == 5
    found = utils.get_batch_on_this_tp_rank(iter([item]), mtp_on_this_rank=False)
    assert list(found)[5:] == ["cu_seqlens", "max_seqlen", "local_cp_size"] and found["max_seqlen"] is None


def test_masks_with_the_arguments_of_older_releases() -> None:
    data = torch.tensor([[1, 9, 2, 9]])
    expected = utils.get_ltor_masks_and_position_ids(data, 9, 0, True, False, True, False)
    older = utils.get_ltor_masks_and_position_ids(data, 9, True, False, True)
    named = utils.get_ltor_masks_and_position_ids(
        data, eod_token=9, reset_position_ids=True, reset_attention_mask=False, eod_mask_loss=True
    )
    for found in (older, named):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(UserError, match="give it the pad_token"):
        utils.get_ltor_masks_and_position_ids(data, 9, pad_mask_loss=True)


def test_values_over_model_parallel_ranks() -> None:
    assert utils.reduce_max_stat_across_model_parallel_group(2.5) == 2.5
    assert utils.reduce_max_stat_across_model_parallel_group(None) is None
    assert utils.logical_and_across_model_parallel_group(True) and not utils.logical_and_across_model_parallel_group(
        False
    )
    with pytest.warns(UserWarning, match="look out"):
        utils.warn_rank_0("look out")
    with pytest.warns(UserWarning, match="anywhere"):
        utils.warn_rank_0("anywhere", rank=0)
