"""megatron/training/config/regrouping_checks.py: what --hybrid-context-parallel needs, and what it does not go with."""

import pytest
from support.command_lines import SMALL, configured, problems_of

NEEDED = "--reset-attention-mask --calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0"


def test_both_names_of_the_flags_are_known() -> None:
    old = configured(f"{NEEDED} --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 64", ranks=2)
    new = configured(f"{NEEDED} --dynamic-context-parallel --max-seqlen-per-cp-rank 64", ranks=2)
    assert old.transformer.hybrid_context_parallel and new.transformer.hybrid_context_parallel
    assert old.transformer.max_seqlen_per_dp_cp_rank == new.transformer.max_seqlen_per_dp_cp_rank == 64


@pytest.mark.parametrize(
    ("flags", "ranks", "problem"),
    [
        ("--pipeline-model-parallel-size 2", 4, "does not go with --pipeline-model-parallel-size 2: stages pass on"),
        ("--attention-dropout 0.1", 2, "does not go with --attention-dropout 0.1: masks are made for rows"),
        ("--num-experts 2", 2, "does not go with --num-experts 2: experts exchange the tokens"),
        (
            "--cp-comm-type a2a --context-parallel-size 2",
            2,
            "exchanges keys with p2p only, not with --cp-comm-type a2a",
        ),
        ("--balanced-packing", 2, "does not go with --balanced-packing: documents are already placed"),
        ("--dataloader-type external", 2, "places the documents of data sets, which --dataloader-type external"),
        ("--use-torch-fsdp2", 2, "does not go with --use-torch-fsdp2, for which all ranks need equally many"),
        (
            "--micro-batch-size 1",
            6,
            "divides the 6 data and context parallel ranks in halves again and again; use 4 or 8",
        ),
        (
            "--max-seqlen-per-dp-cp-rank 63",
            2,
            "--max-seqlen-per-dp-cp-rank 63 is not divisible by 2, the chunks of a rank; use 62 or 64",
        ),
        ("--max-seqlen-per-dp-cp-rank 32", 2, "together have no room for a row of --seq-length 128; use 64 or more"),
        ("--max-seqlen-per-dp-cp-rank 0", 2, "--max-seqlen-per-dp-cp-rank 0"),
    ],
)
def test_what_it_does_not_go_with_is_refused(flags: str, ranks: int, problem: str) -> None:
    found = problems_of(f"{NEEDED} --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 64 {flags}", ranks=ranks)
    assert len(found) == 1 and problem in found[0], found


def test_what_it_needs_is_named() -> None:
    assert problems_of("--hybrid-context-parallel --attention-dropout 0 --hidden-dropout 0", base=SMALL, ranks=2) == [
        "--hybrid-context-parallel needs --max-seqlen-per-dp-cp-rank, the tokens that a rank has memory for; the "
        "longest row divided by --context-parallel-size is a good start",
        "--hybrid-context-parallel places the documents of rows: give --sft or --reset-attention-mask",
        "--hybrid-context-parallel needs --calculate-per-token-loss: its micro-batches have different numbers of "
        "tokens",
    ]
