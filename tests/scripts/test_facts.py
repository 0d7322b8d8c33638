"""The programs of tests/support/released cannot leave the facts: each other call, name and argument is noticed."""

import pytest
from support.released.facts import LOOP_RELEASES, RELEASES, TABLE, Facts

from megatron.core.datasets import gpt_dataset

SCRIPTS = [
    "pretrain_gpt",
    "pretrain_bert",
    "pretrain_t5",
    "run_simple_mcore_train_loop",
    "gpt_builders",
    "model_provider",
]


def test_every_fact_belongs_to_a_script_and_release() -> None:
    found: set[str] = set()
    for script in SCRIPTS:
        newest = RELEASES[-2:] if script in SCRIPTS[4:] else LOOP_RELEASES if script == SCRIPTS[3] else RELEASES
        for release in newest:
            found.update(Facts(script, release).names())
    only_of_loops_that_cannot_run = {"megatron.core.datasets.utils.Split", "megatron.core.datasets.utils.Split.train"}
    assert {fact["name"] for fact in TABLE} - found == only_of_loops_that_cannot_run


def test_a_wrong_keyword_is_noticed() -> None:
    older, newer = Facts("pretrain_gpt", "0.15"), Facts("pretrain_gpt", "0.16")

    def helper(iterator: object, **words: bool) -> tuple[object, dict[str, bool]]:
        return iterator, words

    assert newer.through(helper, "get_batch_on_this_tp_rank", None, mtp_on_this_rank=True)[1]
    with pytest.raises(AssertionError, match="is not among the script's calls"):
        older.through(helper, "get_batch_on_this_tp_rank", None, mtp_on_this_rank=True)
    with pytest.raises(AssertionError, match="is not among the script's calls"):
        newer.through(helper, "get_batch_on_this_tp_rank", None, True)


def test_a_name_of_another_release_is_noticed() -> None:
    assert "megatron.get_args" in Facts("pretrain_bert", "0.5")
    with pytest.raises(AssertionError, match="no such name"):
        Facts("pretrain_bert", "0.6")["megatron.get_args"]
    with pytest.raises(AssertionError, match=r"args\.sft: the script of this release uses no such name"):
        _ = Facts("pretrain_gpt", "0.11").args.sft


def test_a_package_that_loses_a_keyword_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> object:
        flags = dict.fromkeys(["reset_position_ids", "reset_attention_mask", "eod_mask_loss", "tokenizer"])
        facts = Facts("run_simple_mcore_train_loop", "0.16")
        return facts.fill("GPTDatasetConfig", random_seed=0, sequence_length=8, mid_level_dataset_surplus=0.1, **flags)

    def without(*, random_seed: int, sequence_length: int, **others: object) -> None:
        assert others.pop("mid_level_dataset_surplus", None) is None, "an unexpected keyword"

    assert build() is not None
    monkeypatch.setattr(gpt_dataset, "GPTDatasetConfig", without)
    with pytest.raises(AssertionError, match="an unexpected keyword"):
        build()


def test_what_is_left_out_is_noticed() -> None:
    facts = Facts("pretrain_gpt", "0.16")
    before = facts.unused()
    assert "args.seed" in before and len(before) > 80
    facts.use("args.seed")
    facts.through(lambda *words, **given: None, "mtp_on_this_rank", None, ignore_virtual=False, vp_stage=None)
    gone = set(before) - set(facts.unused())
    name = "megatron.core.transformer.multi_token_prediction.mtp_on_this_rank"
    assert gone == {"args.seed", name, str((name, 1, "ignore_virtual vp_stage"))}
