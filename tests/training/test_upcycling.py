"""Runs that begin from a dense checkpoint: the first loss is the dense model's, in every layout, and they continue."""

import pytest
from support.command_lines import problems_of
from support.runs import TINY, logger_of, train, train_on_ranks

from megatron.core.exceptions import UserError

DENSE = f"{TINY} --swiglu --ffn-hidden-size 48 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
HALVES = (
    "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--moe-use-upcycling --moe-upcycling-granularity 2"
)


def test_a_run_begins_as_the_dense_one_and_goes_on(corpus, tmp_path, capsys):
    data = f"--fp64 --data-path {corpus}"
    dense, new = tmp_path / "dense", tmp_path / "new"
    train(f"{data} --train-iters 2 --save {dense}", base=DENSE)
    expected = train(f"{data} --train-iters 1 --load {dense} --finetune", base=DENSE).losses
    upcycle = f"{data} {HALVES} --load {dense} --save {new} --finetune"  # which is for the dense weights alone
    ranks = "--expert-model-parallel-size 2 --moe-grouped-gemm --use-distributed-optimizer"
    found = logger_of(train_on_ranks(f"{upcycle} {ranks} --train-iters 2 --exit-interval 1", 2, base=DENSE))
    assert found.losses == pytest.approx(expected, rel=1e-11)
    capsys.readouterr()
    again = train(f"{upcycle} --train-iters 2", base=DENSE)  # one process, from where the two ranks have stopped
    printed = capsys.readouterr().out
    assert f"--moe-use-upcycling: {new} holds the upcycled run, which is continued" in printed
    assert len(again.losses) == 1 and again.losses != pytest.approx(expected)
    straight = train(f"{data} {HALVES} --load {dense} --train-iters 2", base=DENSE)
    assert straight.losses == pytest.approx([*expected, *again.losses], rel=1e-11)
    printed = capsys.readouterr().out
    assert "each MLP became 8 experts (--moe-use-upcycling)" in printed
    assert "NOTE" not in printed and "WARNING" not in printed


@pytest.mark.slow
def test_weights_that_are_gathered_in_fp8_begin_and_go_on_like_others(tmp_path):
    dense = tmp_path / "dense"
    data = "--mock-data --bf16 --train-iters 2"
    train(f"{data} --save {dense}", base=f"{DENSE} --ffn-hidden-size 64")
    upcycle = f"{data} {HALVES} --moe-ffn-hidden-size 32 --load {dense} --use-distributed-optimizer --fp8-format hybrid"
    without, gathered = (
        logger_of(train_on_ranks(f"{upcycle} {flag}", 2, base=f"{DENSE} --ffn-hidden-size 64"))
        for flag in ("", "--fp8-param-gather")
    )
    assert without.losses == gathered.losses and len(gathered.losses) == 2


def test_folders_that_do_not_fit_are_named():
    (problem,) = problems_of(f"{HALVES} --swiglu --ffn-hidden-size 48")
    assert "--moe-use-upcycling needs --load: the folder of the dense checkpoint that becomes experts" in problem
    (problem,) = problems_of(f"{HALVES} --swiglu --ffn-hidden-size 48 --load here --save here")
    assert "--save here must not be the folder that is read" in problem
    (problem,) = problems_of(f"{HALVES} --swiglu --ffn-hidden-size 48 --load here --save ./here/")
    assert "--save ./here/ must not be the folder that is read" in problem
    problems = problems_of(f"{HALVES} --swiglu --ffn-hidden-size 48 --load here --save there --load-hf elsewhere")
    assert any("--load-hf does not go with --moe-use-upcycling" in problem for problem in problems)


@pytest.mark.slow
def test_another_model_than_the_dense_one_is_named(tmp_path, capsys):
    dense, new = tmp_path / "dense", tmp_path / "new"
    train(f"--mock-data --fp64 --train-iters 1 --save {dense}", base=DENSE)
    capsys.readouterr()
    sinkhorn = "--num-experts 4 --moe-use-upcycling --moe-router-load-balancing-type sinkhorn"
    train(f"--mock-data --fp64 {sinkhorn} --load {dense} --save {new} --norm-epsilon 0.01 --train-iters 1", base=DENSE)
    printed = capsys.readouterr().out
    warnings = [line for line in printed.splitlines() if "WARNING" in line]
    assert warnings == ["WARNING: --norm-epsilon is 0.01 in this run and 1e-05 in the checkpoint"]
    assert "NOTE: the weights of a token's experts do not sum to 1" in printed  # those of sinkhorn routing
    with pytest.raises(UserError, match=r"makes experts of a dense model, but that in .*new has 4 experts a layer"):
        train(f"--mock-data --fp64 {sinkhorn} --load {new} --train-iters 1", base=DENSE)
