"""Flags that do not go with CUDA graphs are refused by name."""

import pytest
from support.command_lines import configured, problems_of

GRAPHS = "--cuda-graph-impl local"


@pytest.mark.parametrize(
    ("flags", "ranks", "problem"),
    [
        (
            "--tensor-model-parallel-size 2",
            2,
            "needs --tensor-model-parallel-size 1, not --tensor-model-parallel-size 2",
        ),
        ("--pipeline-model-parallel-size 2", 2, "needs --pipeline-model-parallel-size 1, not"),
        ("--context-parallel-size 2", 2, "needs --context-parallel-size 1, not --context-parallel-size 2"),
        ("--num-experts 4 --expert-model-parallel-size 2", 2, "needs --expert-model-parallel-size 1, not"),
        ("--num-experts 4", 1, "--num-experts 4 give shapes that depend on the tokens; a model without experts works"),
        ("--use-torch-fsdp2", 2, "frees memory between uses"),
        ("--fp8-format e4m3", 1, "layers with --fp8-format e4m3 quantise weights in the first micro-batch"),
        ("--reset-attention-mask", 1, "is not fixed with --reset-attention-mask; leave one out"),
        ("--log-straggler", 1, "--log-straggler measures forward steps"),
        ("--cuda-graph-scope attn mlp", 1, "--cuda-graph-scope attn mlp: attn is not captured by itself"),
        ("--cuda-graph-warmup-steps 0", 1, "--cuda-graph-warmup-steps 0"),
    ],
)
def test_what_is_no_part_of_a_micro_batch_graph(flags: str, ranks: int, problem: str) -> None:
    found = problems_of(f"{flags} {GRAPHS}", ranks=ranks)
    assert any(problem in line for line in found), found


def test_the_message_names_the_flag_that_was_given() -> None:
    assert problems_of("--num-experts 4 --enable-cuda-graph")[0].startswith("--enable-cuda-graph: ")
    assert problems_of(f"--num-experts 4 {GRAPHS}")[0].startswith("--cuda-graph-impl local: ")


@pytest.mark.parametrize(
    ("flags", "ranks", "problem"),
    [
        ("", 2, "--optimizer-cuda-graph: the update communicates between 2 ranks; leave it out, or train on one"),
        ("--optimizer muon", 1, "--optimizer-cuda-graph: --optimizer muon is not captured; adam and sgd are"),
        (
            "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear",
            1,
            "weight decay is a constant of the graph, and --weight-decay-incr-style linear changes it; leave one out",
        ),
    ],
)
def test_what_is_no_part_of_an_optimizer_graph(flags: str, ranks: int, problem: str) -> None:
    found = problems_of(f"{flags} --optimizer-cuda-graph", ranks=ranks)
    assert any(problem in line for line in found), found


def test_graphs_of_transformer_engine_are_refused() -> None:
    (found,) = problems_of("--cuda-graph-impl transformer_engine")
    assert found == "--cuda-graph-impl transformer_engine: not yet; what works so far is none or local"
    (found,) = problems_of("--external-cuda-graph")
    assert "--external-cuda-graph" in found and "--cuda-graph-impl local" in found


@pytest.mark.parametrize(
    "flags", ["", "--use-distributed-optimizer --overlap-grad-reduce", "--rampup-batch-size 2 2 4"]
)
def test_what_goes_with_graphs(flags: str) -> None:
    length = "--train-samples 40" if "rampup" in flags else "--train-iters 10"
    base = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 {length}"
    data = "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --global-batch-size 4"
    config = configured(f"{flags} {GRAPHS}", base=f"{base} {data}")
    assert config.transformer.cuda_graph_impl == "local"
