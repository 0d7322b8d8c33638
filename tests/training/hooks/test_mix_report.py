"""--data-stages in a run: the mix in the log, and a run that is resumed in the middle of a stage."""

import json
from pathlib import Path

import pytest
from support.runs import train, write_documents

from megatron.core.exceptions import UserError


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    a, b = (write_documents(tmp_path / name, documents=100, seed=seed) for seed, name in enumerate("ab"))
    content = [{"from_sample": 0, "data_path": f"3 {a} 1 {b}"}, {"from_sample": 8, "data_path": [b]}]
    (tmp_path / "stages.json").write_text(json.dumps(content))
    return tmp_path / "stages.json"


@pytest.mark.slow
def test_the_mix_is_in_the_log_and_runs_resume(
    stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--data-stages {stages} --eval-iters 0 --log-interval 2"
    whole = train(f"{flags} --train-iters 5")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    assert lines == [
        "data: stage 1 of 2 from sample 0 | of the stage: a 75.00%, b 25.00% | of the run: a 75.00%, b 25.00%",
        "data: stage 1 of 2 from sample 0 | of the stage: a 75.00%, b 25.00% | of the run: a 75.00%, b 25.00%",
        "data: stage 2 of 2 from sample 8 | of the stage: b 100.00% | of the run: a 50.00%, b 50.00%",
        "data: stage 2 of 2 from sample 8 | of the stage: b 100.00% | of the run: a 37.50%, b 62.50%",
    ]
    save = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 3"
    train(f"{flags} {save} --train-iters 5 --exit-interval 3")
    rest = train(f"{flags} {save} --train-iters 5")
    assert rest.losses == whole.losses[3:]


def test_what_does_not_go_together(stages: Path) -> None:
    with pytest.raises(UserError, match=r"--data-stages gives the order of samples, which --dataloader-type cyclic"):
        train(f"--data-stages {stages} --dataloader-type cyclic --train-iters 1")
    with pytest.raises(UserError, match=r"--data-path and --data-stages say in 2 ways"):
        train(f"--data-stages {stages} --data-path x --train-iters 1")
