"""Greedy tokens of imported models are those of `generate` of transformers, alone and in a batch."""

from pathlib import Path

import pytest
import torch
from conversion.oracles import make_model, save_model

from megatron.conversion.importing import import_model
from megatron.core.inference.generation import generate
from megatron.core.inference.sampling import GREEDY
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

PROMPTS = [[3, 7, 1], [5], [9, 2, 8, 30, 11, 4], [6, 6]]
COUNT = 12


@pytest.mark.fast("llama 3.1", "gpt 2")
@pytest.mark.parametrize("name", ["llama 3.1", "qwen 2", "gpt 2", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name, torch.float64)
    import_model(save_model(model, tmp_path / "hub"), tmp_path / "ours", build_model, log=lambda sentence: None)
    model.set_experts_implementation("eager")  # the faster one has no float64
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": None, "pad_token_id": 0}
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(written[0, len(prompt) :].tolist())
    assert len({tuple(row) for row in expected}) > 2  # rows that all say the same would prove little
    trained = load_trained_model(build_model, tmp_path / "ours", log=lambda sentence: None, changes=["--fp64"])
    assert generate(trained.model, PROMPTS, COUNT, GREEDY) == expected
