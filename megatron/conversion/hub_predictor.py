"""Predictions of a Hugging Face folder, computed by transformers, for evaluation tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.conversion.model_folder import CONFIG, read_json
from megatron.conversion.tokenizer_files import tokenizer_flags
from megatron.conversion.verification import import_transformers
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.tool_flags import Section, read_tool_flags
from megatron.training.evaluation.predictor import Prediction, predictions

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


class HubPredictor:
    """A causal language model of transformers in this process. Half-precision weights are held in float32 on a CPU."""

    def __init__(self, folder: Path, batch_size: int, max_length: int | None = None) -> None:
        """Loads the folder; no code in it is run. `max_length`: default of config.json. Raises UserError for a folder
        that transformers cannot load."""
        transformers = import_transformers("--hf-dir")
        settings = read_json(folder / CONFIG, with_nan=True)
        lengths = [settings[key] for key in _LENGTHS if isinstance(settings.get(key), int)]
        if max_length is None and not lengths:
            raise UserError(f"{folder / CONFIG} does not say how many tokens the model reads: give --max-length")
        self.max_length = lengths[0] if max_length is None else max_length
        self.batch_size = batch_size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: transformers cannot load it: {' '.join(str(error).split())}") from error
        if self.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16):
            model = model.float()
        self.model: nn.Module = model.to(self.device).eval()

    @torch.no_grad()
    def __call__(self, rows: Sequence[Sequence[int]]) -> list[Prediction]:
        """Returns the predictions for each row; see `Predictor`."""
        found: dict[int, Prediction] = {}
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        for first in range(0, len(order), self.batch_size):
            numbers = order[first : first + self.batch_size]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(rows[number]) for number in numbers], batch_first=True)
            lengths = torch.tensor([len(rows[number]) - 1 for number in numbers])
            real = torch.arange(ids.shape[1] - 1) < lengths[:, None]
            logits = self.model(ids[:, :-1].to(self.device), attention_mask=real.long().to(self.device)).logits
            table = predictions(logits, ids[:, 1:].to(self.device), None).cpu()
            for number, length, (log_probs, likeliest) in zip(numbers, lengths.tolist(), table.unbind(1), strict=True):
                found[number] = Prediction(log_probs[:length], likeliest[:length].long())
        return [found[number] for number in range(len(rows))]


def tokenizer_of_folder(folder: Path, log: Log = print) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder."""
    words = tokenizer_flags(folder, read_json(folder / CONFIG, with_nan=True)["vocab_size"], folder, log)
    return build_tokenizer(read_tool_flags(words, [Section("tokenizer", TokenizerConfig)], "", "")[0])
