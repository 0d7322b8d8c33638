"""--hybrid-context-parallel: runs whose documents are on 1, 2 and 4 ranks equal the run of one process without it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from support.chat_templates import CHATML, write_folder
from support.runs import GPT, TINY, logger_of, state_at_end, train, train_all_on_ranks
from training.test_layouts import evaluations, facts, norms

from megatron.core.exceptions import UserError

BASE = f"{TINY} --num-attention-heads 4 --num-query-groups 2 --group-query-attention --mtp-num-layers 1"
RUN = (
    "--fp64 --train-iters 3 --eval-interval 2 --eval-iters 1 --lr-warmup-iters 1 --attention-dropout 0 "
    "--hidden-dropout 0 --seq-length 64 --max-position-embeddings 64 --global-batch-size 8 --calculate-per-token-loss "
    "--reset-position-ids --reset-attention-mask --eod-mask-loss --position-embedding-type rope"
)
DYNAMIC = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank"
LAYOUTS = {
    "CP 2 x DP 2": f"{DYNAMIC} 16 --context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--rampup-batch-size 4 4 8",
    "TP 2 x CP 2": f"{DYNAMIC} 32 --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
}


def test_runs_equal_one_process_without_it(corpus: str) -> None:
    runs = [f"{RUN} --data-path {corpus} {layout}" for layout in LAYOUTS.values()]
    by_rank = train_all_on_ranks(runs, 4, base=BASE)
    for number, layout in enumerate(LAYOUTS.values()):
        growth = "--rampup-batch-size 4 4 8" if "rampup" in layout else ""
        alone = train(f"{RUN} --data-path {corpus} {growth}", base=BASE)
        ranks = [outcomes[number] for outcomes in by_rank]
        seen = logger_of(ranks)
        assert seen.losses == pytest.approx(alone.losses, abs=1e-11)
        assert norms(seen) == pytest.approx(norms(alone), rel=1e-11) and len(norms(seen)) == 3
        assert evaluations(seen) == evaluations(alone)
        for record, expected_record in zip(seen.validations, alone.validations, strict=True):
            assert record.losses == pytest.approx(expected_record.losses, abs=1e-11)
        end, expected_end = state_at_end(ranks), state_at_end([alone])
        assert end.keys() == expected_end.keys()
        assert max(float((end[name] - expected_end[name]).abs().max()) for name in end) < 1e-9
        assert all(facts(rank) == facts(alone) for rank in ranks)
        counts = {len(micro_batches) for rank in ranks for micro_batches in rank.sample_ids}
        assert len(counts) > 1, "every rank has equally many micro-batches, as without regrouping"


CONVERSATIONS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --sft "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --num-workers 0 --log-interval 100 --split 90,10,0 "
    "--eval-iters 0 --tokenizer-type SFTTokenizer --fp64 --train-iters 4 --attention-dropout 0 --hidden-dropout 0 "
    "--calculate-per-token-loss --position-embedding-type rope"
)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a run on 60 conversations, most of them short."""
    folder = tmp_path_factory.mktemp("talks")
    tokenizer = write_folder(folder / "tokenizer", CHATML)
    with (folder / "talks.jsonl").open("w") as file:
        for number, words in enumerate(np.random.default_rng(3).lognormal(1.2, 1.0, 60).clip(1, 30).astype(int)):
            answer = " ".join(f"word{number}" for _ in range(words))
            turns = [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return f"{CONVERSATIONS} --tokenizer-model {tokenizer} --data-path {folder / 'talks.jsonl'}"


def test_conversations_equal_one_process_and_go_on_in_another_layout(conversations: str, tmp_path: Path) -> None:
    """A run stops after two steps on ranks in one layout, and goes on with the documents on other ranks, or in rows."""
    save, load = f"--exit-interval 2 --save {tmp_path}", f"--load {tmp_path}"
    mixed = f"{DYNAMIC} 64 --context-parallel-size 2 --overlap-grad-reduce --use-distributed-optimizer"
    runs = [
        f"{mixed} --overlap-param-gather {save}",
        f"{load} {DYNAMIC} 64",
        f"{load} --context-parallel-size 4",
    ]
    by_rank = train_all_on_ranks(runs, 4, base=conversations)
    alone = train("", base=conversations)
    first, dynamic, rows = ([outcomes[number] for outcomes in by_rank] for number in range(3))
    assert logger_of(first).losses == pytest.approx(alone.losses[:2], abs=1e-11)
    counts = {len(micro_batches) for rank in first for micro_batches in rank.sample_ids}
    assert len(counts) > 1, "every rank has equally many micro-batches"
    expected = state_at_end([alone])
    for resumed in (dynamic, rows):
        assert logger_of(resumed).losses == pytest.approx(alone.losses[2:], abs=1e-11)
        end = state_at_end(resumed)
        assert end.keys() == expected.keys()
        assert max(float((end[name] - expected[name]).abs().max()) for name in end) < 1e-9


def test_a_script_that_does_not_cut_shared_batches_is_told() -> None:
    with pytest.raises(
        UserError, match=r"does not say that its forward step cuts .* \(Providers.cuts_shared_batches\)"
    ):
        train(f"{RUN} --mock-data {DYNAMIC} 64", dataclasses.replace(GPT, cuts_shared_batches=False))
