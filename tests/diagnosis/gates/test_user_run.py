"""Commands of users: their parts, the ranks that they need, and the flags that a gate keeps."""

from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.user_run import FinishedPart, kept_flags, ranks_needed, read_user_run, run_part

ROOT = Path(__file__).resolve().parents[3]
GPT = ROOT / "pretrain_gpt.py"


def test_a_command_with_a_launcher() -> None:
    words = f"torchrun --nproc-per-node 4 --nnodes=2 {GPT} --tensor-model-parallel-size 2 --lr 1".split()
    run = read_user_run(words, GPT)
    assert run.launcher == ("torchrun", "--nproc-per-node", "4", "--nnodes=2") and run.processes == 8
    assert run.flags[-2:] == ("--lr", "1") and run.script == GPT


def test_flags_alone_are_those_of_the_default_script() -> None:
    run = read_user_run(["--pipeline-model-parallel-size", "2"], GPT)
    assert (run.script, run.processes, run.launcher) == (GPT, 2, ())


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3", 6),
        ("--num-experts 8 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2", 8),
        ("--num-experts 8 --expert-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
        ("--context-parallel-size 2", 2),
        ("", 1),
    ],
)
def test_ranks_of_a_layout(flags: str, ranks: int) -> None:
    assert ranks_needed(read_user_run([str(GPT), *flags.split()], GPT).values()) == ranks


def test_another_layout_starts_as_many_ranks_as_before_or_as_it_needs() -> None:
    run = read_user_run([str(GPT)], GPT, processes=4)
    assert run.with_layout(["--tensor-model-parallel-size", "2"]).processes == 4
    assert run.with_layout(["--tensor-model-parallel-size", "8"]).processes == 8


def test_a_gate_keeps_the_model_and_the_script_s_flags_and_leaves_folders_alone() -> None:
    flags = "--num-layers 2 --save mine --load=mine --tensorboard-dir tb --eval-iters 5 --my-flag 3 --exit-interval 9"
    assert kept_flags(flags.split()) == ["--num-layers", "2", "--my-flag", "3"]


def test_folders_of_a_config_file_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("save: /mine\nload: /mine\nnum_layers: 2\n")
    script = tmp_path / "print_words.py"
    script.write_text("import sys; print(*sys.argv[1:])")
    run = read_user_run([str(script), "--config", str(tmp_path / "run.yaml")], GPT)
    part = run_part(run, tmp_path / "gate", 7)
    assert f"--save {tmp_path}/gate/save" in part.output and f"--load {tmp_path}/gate/load" in part.output
    assert "--exit-interval 7" in part.output


def test_a_run_that_refuses_its_flags_says_why(tmp_path: Path) -> None:
    script = tmp_path / "refuse.py"
    script.write_text("import sys; print('error: --lr 0: too low', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UserError, match="the run refuses to start: --lr 0: too low"):
        run_part(read_user_run([str(script)], GPT), tmp_path / "gate", 1)


def test_a_failure_is_one_line() -> None:
    part = FinishedPart(Path("x"), 1, 1, "a\nValueError: no\n  at exit\n")
    assert part.failure == "ValueError: no"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no run to judge"),
        (["nowhere.py"], "nowhere.py: no such script"),
        (["torchrun", "--nproc-per-node", "auto", str(GPT)], "give the number of processes as a number"),
        (["torchrun", "--nproc-per-node", "3", str(GPT), "--tensor-model-parallel-size", "2"], "a multiple of 2 ranks"),
    ],
)
def test_commands_that_are_no_run(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_user_run(words, GPT)


def test_a_rank_starts_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="start the gate once"):
        read_user_run([str(GPT)], GPT)
