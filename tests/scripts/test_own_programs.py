"""A whole program as a stranger writes it from Megatron-LM's documentation: fine-tuning with its own data, loop and
training step, evaluation, checkpoints, exit by a signal, and text that is generated at the end."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from support.pool import Pool
from support.runs import train

from megatron.core.inference.generation import generate
from megatron.core.inference.sampling import GREEDY
from megatron.training import global_vars, training
from megatron.training.trained_model import load_trained_model
from tools.entry_scripts import build_model

SCRIPT = Path(__file__).parent / "own_programs" / "finetune.py"
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --max-position-embeddings 24 "
    "--micro-batch-size 2 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --fp64 "
    "--lr-decay-style constant --eval-iters 2 --hidden-dropout 0 --attention-dropout 0 --num-workers 0 --train-iters 4"
)


def said(words: str) -> str:
    """What rank 0 or the last one prints while the script runs with these words."""
    given = {}
    if dist.is_initialized():
        given = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    before, sys.argv = sys.argv, [str(SCRIPT), *MODEL.split(), *words.split()]
    text = io.StringIO()
    try:
        with mock.patch.dict(os.environ, given), contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = before
        global_vars.clear_current_run()
    return text.getvalue()


def said_under(layouts: list[str], words: str, folder: str) -> list[str]:
    return [said(f"{words} {layout} --save {folder}/{number}") for number, layout in enumerate(layouts)]


def losses(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"(?:loss|norm|weights) (\d+\.\d+)", text)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a fine-tuning of a model that was trained before."""
    folder = tmp_path_factory.mktemp("own")
    train(f"--mock-data --save {folder}/before --train-iters 1", base=MODEL)
    rows = [{"prompt": f"{n} {n + 1} {n + 2}", "answer": f"{n + 3} {n + 4} {n + 5}"} for n in range(1, 25)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"--pairs {folder}/pairs.jsonl --answer-loss-only --pretrained-checkpoint {folder}/before"


def test_it_runs_and_goes_on(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = said(f"{words} --save {tmp_path}/whole --save-interval 2")
    assert "begins at iteration 0 with 24 pairs" in whole and "earlier run" not in whole
    assert len(losses(whole)) == 9 and re.search(r"^evaluation \d\.\d+$", whole, re.MULTILINE)
    trained = load_trained_model(build_model, tmp_path / "whole")
    (ids,) = generate(trained.model, [[7, 8, 9]], 4, GREEDY)
    assert f"completion {' '.join(map(str, [7, 8, 9, *ids]))}\n" in whole

    ended = f"{words} --save {tmp_path}/ended --load {tmp_path}/ended --exit-signal-handler"
    build = training.get_optimizer_param_scheduler

    def signalled(optimizer: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return build(optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(training, "get_optimizer_param_scheduler", signalled)
        first = said(ended)
    assert "exits by a signal" in first and len(losses(first)) == 2
    rest = said(f"{ended} --save-interval 2")
    assert "begins at iteration 1" in rest and "earlier run" not in rest
    assert losses(first) + losses(rest) == losses(whole)
    for folder in ("whole", "ended"):
        (manifest,) = (json.loads(path.read_text()) for path in (tmp_path / folder).glob("iter_0000004/manifest.json"))
        assert manifest["common"]["train_state"]["consumed_train_samples"] == 32


@pytest.mark.slow
def test_layouts_give_the_same(words: str, tmp_path: Path) -> None:
    layouts = ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--use-distributed-optimizer"]
    expected = losses(said(f"{words} --save {tmp_path}/alone"))
    with Pool(2) as pool:
        by_rank = pool.run(said_under, 2, layouts, words, str(tmp_path))
    for layout, *texts in zip(layouts, *by_rank, strict=True):
        assert losses(texts[1] + texts[0]) == pytest.approx(expected, abs=2e-6), layout
