"""Flags that do not go with CUDA graphs are refused by name."""

import pytest
from support.command_lines import configured, problems_of

GRAPHS = "--cuda-graph-impl local"
WHOLE = "read as --cuda-graph-impl local: a graph holds a whole micro-batch, with all parts of its layers"
GROUPED = "--num-experts 4 --moe-grouped-gemm --bf16 --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "ranks", "problem"),
    [
        (
            "--tensor-model-parallel-size 2",
            2,
            f"{GRAPHS}: --tensor-model-parallel-size 2 communicates inside a micro-batch, and a graph does not; leave "
            "the graphs out, or give --tensor-model-parallel-size 1 and use more data parallel ranks "
            "(--use-distributed-optimizer)",
        ),
        ("--pipeline-model-parallel-size 2", 2, "or give --pipeline-model-parallel-size 1 and use more data parallel"),
        ("--context-parallel-size 2", 2, "or give --context-parallel-size 1 and use more data parallel ranks"),
        ("--num-experts 4 --expert-model-parallel-size 2", 2, "or give --expert-model-parallel-size 1 and use more"),
        ("--num-experts 4", 1, "--num-experts 4 need --moe-grouped-gemm and --bf16 in a graph"),
        (
            f"{GROUPED} --moe-expert-capacity-factor 1",
            1,
            "--moe-expert-capacity-factor reads on the host which experts",
        ),
        (f"{GROUPED} --moe-router-load-balancing-type global_aux_loss", 1, "global_aux_loss counts micro-batches on"),
        ("--use-torch-fsdp2", 2, "frees memory between uses"),
        ("--reset-attention-mask", 1, "is not fixed with --reset-attention-mask; leave one out"),
        (
            "--rampup-batch-size 4 4 100 --global-batch-size 36",
            1,
            "each batch size has a graph, and --rampup-batch-size has 9 sizes; give at most 8",
        ),
        ("--log-straggler", 1, "--log-straggler measures forward steps"),
        ("--cuda-graph-modules norm", 1, "--cuda-graph-scope: norm is no part of a layer; attn, mamba"),
        ("--cuda-graph-warmup-steps 0", 1, "--cuda-graph-warmup-steps 0"),
    ],
)
def test_what_is_no_part_of_a_micro_batch_graph(flags: str, ranks: int, problem: str) -> None:
    found = problems_of(f"{flags} {GRAPHS}", ranks=ranks)
    assert any(problem in line for line in found), found


def test_the_message_names_the_flag_that_was_given() -> None:
    assert problems_of(f"--num-experts 4 {GRAPHS}")[0].startswith("--cuda-graph-impl local: ")


@pytest.mark.parametrize(
    ("flags", "ranks"), [("--tensor-model-parallel-size 2", 2), ("--num-experts 4", 1), ("--log-straggler", 1)]
)
def test_the_older_flag_stays_in_commands_without_graphs(flags: str, ranks: int) -> None:
    """Graphs only change speed. Scripts for Megatron-LM leave --enable-cuda-graph in for every layout."""
    config = configured(f"--enable-cuda-graph {flags}", ranks=ranks)
    assert config.transformer.cuda_graph_impl == "none" and not config.transformer.enable_cuda_graph
    (note,) = [note for note in config.notes if note.startswith("--enable-cuda-graph: has no effect: ")]
    assert flags in note and "results are the same" in note


def test_the_older_flag_makes_graphs_where_they_fit() -> None:
    assert configured("--enable-cuda-graph").transformer.enable_cuda_graph


@pytest.mark.parametrize(
    ("flags", "ranks", "note"),
    [
        ("--cuda-graph-impl transformer_engine", 1, f"--cuda-graph-impl transformer_engine: {WHOLE}"),
        ("--cuda-graph-impl full_iteration", 1, f"--cuda-graph-impl full_iteration: {WHOLE}"),
        ("--external-cuda-graph --cuda-graph-modules attn moe_preprocess", 1, f"--external-cuda-graph: {WHOLE}"),
        (
            f"{GRAPHS} --cuda-graph-scope attn --tensor-model-parallel-size 2",
            2,
            "--cuda-graph-impl local: has no effect: --tensor-model-parallel-size 2 communicates inside a micro-batch, "
            "and a graph does not; leave the graphs out, or give --tensor-model-parallel-size 1 and use more data "
            "parallel ranks (--use-distributed-optimizer); results are the same",
        ),
    ],
)
def test_graphs_of_other_extents_are_of_whole_micro_batches(flags: str, ranks: int, note: str) -> None:
    config = configured(flags, ranks=ranks)
    assert note in config.notes
    assert config.transformer.cuda_graph_impl == ("none" if "no effect" in note else "local")


@pytest.mark.parametrize(
    "flags", ["", "--use-distributed-optimizer --overlap-grad-reduce", "--rampup-batch-size 2 2 4"]
)
def test_what_goes_with_graphs(flags: str) -> None:
    length = "--train-samples 40" if "rampup" in flags else "--train-iters 10"
    base = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 {length}"
    data = "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --global-batch-size 4"
    config = configured(f"{flags} {GRAPHS}", base=f"{base} {data}")
    assert config.transformer.cuda_graph_impl == "local"


def test_what_a_graph_of_an_iteration_holds_is_said() -> None:
    def said(flags: str) -> list[str]:
        return [note for note in configured(f"{GRAPHS} {flags}").notes if note.startswith("--cuda-graph-scope full_it")]

    (plain,) = said("--cuda-graph-scope full_iteration")
    assert "replayed for each micro-batch" in plain
    assert not said("") and not said("--cuda-graph-scope attn")


def test_the_layout_that_a_refusal_names_has_graphs() -> None:
    assert problems_of(f"{GRAPHS} --use-distributed-optimizer", ranks=2) == []
