"""Predictions of a Hugging Face folder by transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.conversion.hub_predictor import HubPredictor
from megatron.core.exceptions import UserError

ROWS = [[1, 2, 3, 4, 5, 6], [9, 8], [3, 3, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=12, max_position_embeddings=32, initializer_range=1.0))
    path = tmp_path_factory.mktemp("llama")
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_rows_are_predicted_as_if_alone_in_float32(folder: Path) -> None:
    predictor = HubPredictor(folder, batch_size=2)
    assert predictor.max_length == 32
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, found in zip(ROWS, predictor(ROWS), strict=True):
        logits = model(torch.tensor([row[:-1]])).logits[0].detach()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        torch.testing.assert_close(found.log_probs, expected.double(), rtol=1e-5, atol=1e-5)
        assert found.likeliest.tolist() == logits.argmax(-1).tolist()


def test_what_a_folder_does_not_say_is_asked_for(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    del settings["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="does not say how many tokens the model reads: give --max-length"):
        HubPredictor(tmp_path, batch_size=2)
    with pytest.raises(UserError, match="transformers cannot load it"):
        HubPredictor(tmp_path, batch_size=2, max_length=8)
