"""pretrain_bert.py: its loss, whole runs from flags in several layouts, checkpoints, and Megatron-LM's commands."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_lines import ENTRY_DEFAULTS, megatron_lm_commands, smallest_world
from support.runs import Outcome, train

import pretrain_bert
from megatron.core.transformer.enums import AttnBackend
from megatron.data.tokenizer.null import NullTokenizer
from megatron.diagnosis.memory.rank_memory import rank_memory
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.providers import Providers
from tools import generate

CORPUS = Path(__file__).parents[1] / "data" / "golden" / "corpus"
PROVIDERS = Providers(pretrain_bert.build_model, pretrain_bert.build_datasets, pretrain_bert.build_forward_step)
BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --fp64 --num-workers 0 --log-interval 1 "
    f"--eval-interval 4 --eval-iters 1 --vocab-file {CORPUS}/bert/vocab.txt --split 80,10,10 "
    f"--data-path {CORPUS}/pp/bert_body_document"
)


def runs(flags: list[str], folder: str) -> list[Outcome]:
    """Trains each on this rank."""
    base = f"{BASE} --data-cache-path {folder}"
    return [train(each, PROVIDERS, base=base, defaults=pretrain_bert.DEFAULTS) for each in flags]


def test_the_loss_is_the_sum_of_two_means_over_the_micro_batch() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 64.0, 64.0]])
    mask = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
    in_order = torch.tensor([[0.0, 2.0], [1.0, 0.0], [5.0, 5.0]])
    swapped = torch.tensor([1, 1, -1])  # the third row fills up the batch
    loss, report = pretrain_bert.loss_func(mask, swapped, (losses, in_order))
    order = torch.logsumexp(in_order[:2], 1) - in_order[:2, 1]
    assert torch.allclose(loss, torch.tensor(21.0 / 3) + order.mean())
    assert report["lm loss"].tolist() == [21.0, 3.0] and torch.allclose(report["sop loss"][0], order.sum())
    assert report["sop loss"][1] == 2
    total, count, report = pretrain_bert.loss_func(mask, swapped, (losses, None))
    assert (total, count) == (21.0, 3) and report.keys() == {"lm loss"}
    nothing, _ = pretrain_bert.loss_func(mask * 0, swapped * 0 - 1, (losses, in_order))
    assert nothing == 0.0


@pytest.mark.fast("--bf16")
@pytest.mark.parametrize("flags", ["--bf16", "--bert-no-binary-head --calculate-per-token-loss --bf16"])
def test_a_run_in_half_precision_learns(flags: str, tmp_path: Path) -> None:
    base = f"{BASE} --data-cache-path {tmp_path}".replace("--fp64", flags)
    outcome = train("--train-iters 12", PROVIDERS, base=base, defaults=pretrain_bert.DEFAULTS)
    assert outcome.losses[-1] < outcome.losses[0] - 0.3
    assert ("sop loss" in outcome.steps[0].losses) == ("--bert-no-binary-head" not in flags)


def test_generate_fills_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs([f"--save {tmp_path}/kept --train-iters 2"], str(tmp_path / "cache"))
    prompts = ["--prompt", "one [MASK] two [MASK]", "--prompt", "a [MASK]", "--no-echo"]
    assert generate.main(["--load", f"{tmp_path}/kept", *prompts]) == 0
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()[-2:]] == [2, 1]
    for prompt, said in (("no mask", "there is no [MASK] in it"), ("[MASK] " * 40, "the model has 32 positions")):
        assert generate.main(["--load", f"{tmp_path}/kept", "--prompt", prompt]) == 2
        assert said in capsys.readouterr().err


COMMANDS = [row for row in megatron_lm_commands() if row["entry"] == "pretrain_bert.py"]


@pytest.mark.slow_cases(
    "v0.16.1:tests/functional_tests/test_cases/bert/bert_release",
    "main:tests/functional_tests/test_cases/bert/bert_release_sm",
)
@pytest.mark.parametrize("command", COMMANDS, ids=[row["source"] for row in COMMANDS])
def test_megatron_lm_commands_build_their_model_on_every_rank(command: dict[str, Any]) -> None:
    words = shlex.split(command["command"])
    environment = LaunchEnvironment(smallest_world(words), True)
    config = configure(words, None, ENTRY_DEFAULTS["pretrain_bert.py"], launch_environment=environment)
    # Kernels are the affair of a machine with GPUs; what ranks hold does not depend on them.
    config.transformer.attention_backend = AttnBackend.auto
    assert config.tokenizer.family == "BertWordPieceLowerCase"
    assert len(rank_memory(config, PROVIDERS, NullTokenizer(1000, None, None), 1024)) == config.world_size
