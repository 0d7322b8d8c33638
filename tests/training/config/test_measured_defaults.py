"""Defaults that follow from measurements, and the pages that have these."""

import re
from pathlib import Path
from typing import Any

from support.command_lines import configured

from megatron.training.config import measured_defaults

ROOT = Path(__file__).parents[3]


def test_each_rule_names_numbers_of_the_benchmarks() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    for rule in measured_defaults.MEASURED.values():
        times = re.findall(r"\d+\.\d", rule.row)
        assert len(times) == 2 and all(f"{time} " in page for time in times), rule


def test_gpus_that_share_experts_send_a_token_once_to_each_rank_where_that_is_less() -> None:
    def dispatcher(experts: int, ranks: int, flags: str = "", has_cuda: bool = True) -> str:
        flags += f" --num-experts {experts} --expert-model-parallel-size {ranks}"
        config = configured(flags, ranks=ranks, has_cuda=has_cuda)
        noted = [note for note in config.notes if note.startswith("--moe-token-dispatcher-type flex: the default")]
        assert bool(noted) == (config.provenance["moe_token_dispatcher_type"] == "derived")
        found = config.transformer.moe_token_dispatcher_type
        return f"{found} {noted[0].split('token to ')[1].split()[0]}" if noted else found

    # Two of four experts: 1 - 1/6 of the tokens go to the other rank.
    assert dispatcher(4, 2) == "flex 83%"
    assert dispatcher(64, 8, "--moe-router-topk 8") == "flex 68%"
    assert dispatcher(64, 2, "--moe-router-topk 8") == dispatcher(64, 4, "--moe-router-topk 8") == "allgather"
    assert dispatcher(4, 2, has_cuda=False) == dispatcher(4, 1) == "allgather"
    assert dispatcher(4, 2, "--moe-token-dispatcher-type alltoall") == "alltoall"
    assert configured(has_cuda=True).transformer.moe_token_dispatcher_type == "allgather"


def test_two_tensor_parallel_ranks_of_a_host_with_gpus_cut_their_products() -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 4096 --max-position-embeddings 4096"

    def pieces(flags: str = "", words: str = layout, **where: Any) -> tuple[bool, bool]:
        config = configured(f"{words} {flags}", **{"ranks": 4, "has_cuda": True, "of_host": 4, **where})
        noted = any(note.startswith("--tp-comm-overlap --tp-comm-overlap-rs-dgrad: the def") for note in config.notes)
        assert noted == (config.provenance["tp_comm_overlap"] == "derived")
        return config.transformer.tp_comm_overlap, config.transformer.tp_comm_overlap_rs_dgrad

    assert pieces() == pieces("--tp-comm-overlap --tp-comm-overlap-rs-dgrad", has_cuda=False) == (True, True)
    assert pieces("--tp-comm-overlap") == (True, False)
    assert pieces("--cuda-graph-impl transformer_engine") == pieces("--external-cuda-graph") == (True, True)
    off = pieces("--no-tp-comm-overlap"), pieces(has_cuda=False), pieces(of_host=None)
    off += (pieces("--allow-tensor-parallel-across-nodes", of_host=1),)
    off += pieces("--fp8-format hybrid --bf16"), pieces("--transformer-impl transformer_engine")
    off += pieces(words="--tensor-model-parallel-size 2 --sequence-parallel"), pieces(words=layout.replace("2", "4", 1))
    assert set(off) == {(False, False)}


MIXTURE = (
    "--num-experts 64 --expert-model-parallel-size 2 --moe-router-topk 8 --moe-grouped-gemm --disable-bias-linear "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size {} --global-batch-size 128"
)


def test_two_expert_parallel_ranks_of_a_host_with_gpus_hide_their_exchange() -> None:
    def chosen(flags: str = "", micro_batch: int = 8, words: str = MIXTURE, **where: Any) -> bool:
        where = {"ranks": 2, "has_cuda": True, "of_host": 2, **where}
        config = configured(f"{words.format(micro_batch)} {flags}", **where)
        notes = [note for note in config.notes if "the default of two expert parallel ranks" in note]
        assert bool(notes) == (config.provenance["delay_wgrad_compute"] == "derived")
        return config.transformer.delay_wgrad_compute

    assert chosen() == chosen("--moe-token-dispatcher-type allgather") is True
    # 4096 tokens of a rank's 32768 choose an expert, with even routing.
    assert chosen(micro_batch=4) is True
    assert chosen(micro_batch=2) is False
    assert chosen("--no-delay-wgrad-compute") is False
    one = "--moe-router-topk 1 --moe-router-score-function sigmoid "
    one += "--moe-token-dispatcher-type allgather"
    assert chosen(one, micro_batch=64) is True
    assert chosen(words=MIXTURE.replace("--moe-grouped-gemm ", "")) is True
    assert chosen("--fp8-format hybrid --bf16") is True
    # Four ranks: two have copies of each expert.
    assert chosen(ranks=4, of_host=4) == chosen(ranks=4, of_host=2) is True
    assert chosen("--pipeline-model-parallel-size 2", ranks=4, of_host=4) is True
    alone = chosen(has_cuda=False), chosen(of_host=None), chosen(of_host=1)
    alone += chosen("--moe-token-dispatcher-type alltoall"), chosen("--moe-token-dispatcher-type flex")
    alone += chosen("--expert-model-parallel-size 4", ranks=4, of_host=4), chosen("--use-megatron-fsdp")
    alone += (chosen("--tensor-model-parallel-size 2 --sequence-parallel", ranks=4, of_host=4),)
    assert all(each is False for each in alone)


def test_two_gpus_with_alltoall_are_told_what_is_faster() -> None:
    def told(flags: str, has_cuda: bool = True) -> bool:
        words = f"{MIXTURE.format(8)} --moe-token-dispatcher-type {flags}"
        return measured_defaults.ALLGATHER_IS_FASTER in configured(words, ranks=2, has_cuda=has_cuda, of_host=2).notes

    assert told("alltoall")
    assert not told("allgather") and not told("alltoall --moe-router-topk 2") and not told("alltoall", has_cuda=False)
