"""Checks of a conversion: weights are finite, and our model and transformers compute the same logits."""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from megatron.conversion.model import BuildModel, load_on_cpu, vocab_size_of
from megatron.conversion.model_folder import read_config
from megatron.conversion.text_part import TEXT_PARTS
from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.exceptions import UserError
from megatron.training.config.model import ModelConfig
from megatron.training.config.recorded_flags import words_of_spec
from megatron.training.trained_model import config_for_one_process

TOLERANCE = 1e-3
"""Largest accepted difference of two logits, in standard deviations of all logits.

Both programs compute in float32, where the differences of equal models are about 1e-6. Weights that are in the wrong
place, or a wrong setting, give differences of about 1.
"""

_TOLERANCE_OF_ALIBI = 0.1
"""Tolerance for Falcon with ALiBi: transformers rounds slopes and their products with positions to bfloat16, which is
not exact for more than 8 heads. Differences of equal models are about 0.02."""

_ROWS, _SHORTEST, _BEYOND_WINDOW = 2, 64, 32


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison of logits."""

    rows: int
    length: int
    """Tokens of a row."""
    difference: float
    """Largest difference of two logits, in standard deviations of all logits; NaN if any logit is NaN."""
    tolerance: float = TOLERANCE
    """Largest accepted difference."""

    def check(self, subject: str) -> None:
        """Raises UserError naming `subject` unless the difference is within rounding."""
        if not self.difference <= self.tolerance:
            raise UserError(
                f"{subject}: transformers computes other logits than this model, for {self.rows} rows of {self.length} "
                f"random tokens: the largest difference is {self.difference:.3g} standard deviations of the logits, "
                f"{self.tolerance:g} is allowed"
            )


def check_finite(values: Tensor, where: str, stored: torch.dtype) -> None:
    """Raises UserError that begins with `where` if a value is NaN or infinite.

    `stored` is the type that the values had before they were converted to their type.
    """
    low, high = torch.aminmax(values if values.dtype.itemsize > 1 else values.float())
    if torch.isfinite(low) and torch.isfinite(high):
        return
    hint = "" if values.dtype == stored else f" as {_word(values.dtype)} (it is stored as {_word(stored)})"
    raise UserError(f"{where} has values that are NaN or infinite{hint}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def compare_logits(
    checkpoint: Checkpoint,
    folder: Path,
    build_model: BuildModel,
    *,
    exported_as: Mapping[str, torch.dtype] | None = None,
    imported_as: torch.dtype | None = None,
    spec: Sequence[str] | None = None,
) -> Comparison:
    """Computes logits of random tokens with the model of a checkpoint, and with transformers from a folder.

    Both compute in float32 on the CPU, one after the other, so memory for one model is needed. Rows are long enough to
    exceed the sliding window, if the model has one. Weights are first rounded as the conversion rounds them: those of
    the checkpoint to the types of the exported tensors, by canonical name, or those of the folder to the type of the
    imported tensors. `spec` are module and name of the layers of a model with --spec. Raises UserError if transformers
    is not installed or cannot read the folder.
    """
    transformers = import_transformers()
    config = config_for_one_process(
        checkpoint.manifest.config, ["--no-initialization", *words_of_spec(spec)], has_cuda=False
    )
    vocab_size = vocab_size_of(checkpoint)
    tokens = sample_tokens(vocab_size, config.model.max_position_embeddings, config.transformer.window_size)
    model = load_on_cpu(checkpoint, config, build_model, vocab_size)
    if exported_as is not None:
        for chunk in model_chunks(model, lambda info: ()):
            chunk.flat.copy_(chunk.flat.to(exported_as[chunk.name]))
    types = _token_types(tokens, config.model)
    ours = [output.float() for output in _our_logits(model, config.model.model_family, tokens, types)]
    del model
    theirs = _logits_of_transformers(transformers, folder, config.model.model_family, tokens, types, imported_as)
    differences = [(one - other).abs().max() / other.std() for one, other in zip(ours, theirs, strict=True)]
    tolerance = _TOLERANCE_OF_ALIBI if read_config(folder).get("alibi") else TOLERANCE
    return Comparison(tokens.shape[0], tokens.shape[1], float(torch.stack(differences).max()), tolerance)


def _token_types(tokens: Tensor, model: ModelConfig) -> Tensor | None:
    """Returns BERT's token types, two segments of equal length if the model tells segments apart; None for models
    without token types."""
    if model.model_family != "bert" or not model.num_tokentypes:
        return None
    segments = min(model.num_tokentypes, 2)
    return (torch.arange(tokens.shape[1]) * segments // tokens.shape[1]).expand_as(tokens)


def _our_logits(model: nn.Module, model_family: str | None, tokens: Tensor, types: Tensor | None) -> list[Tensor]:
    """Returns all outputs of a model; a BERT may have two. The decoder of a T5 reads the tokens in reverse order."""
    if model_family == "t5":
        return [model(tokens, tokens.flip(1))]
    if model_family != "bert":
        return [model(tokens)]
    return [output for output in model(tokens, None, types) if output is not None]


def import_transformers(flag: str = "--verify") -> ModuleType:
    """Returns the module. Raises UserError, naming the flag that needs it, if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"{flag} needs transformers, which cannot be imported ({error}): pip install it") from error


def why_not_verified(architecture: str, num_parameters: int) -> str | None:
    """Returns why the logits of a model cannot be compared on this machine; None if they can."""
    try:
        transformers = import_transformers()
    except UserError:
        return "transformers is not installed"
    if not hasattr(transformers, architecture):
        return f"transformers {transformers.__version__} has no {architecture}"
    needed, memory = 4 * num_parameters, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * needed > memory:
        return f"in float32 the model takes {needed / 1e9:.1f} GB, over half of this machine's {memory / 1e9:.1f} GB"
    return None


def sample_tokens(vocab_size: int, max_length: int, window_size: tuple[int, int] | None) -> Tensor:
    """Returns random token ids [rows, length], always the same. Rows exceed the window where the model allows it."""
    longest_window = max(window_size or (0, 0))
    length = min(max_length, max(_SHORTEST, longest_window + _BEYOND_WINDOW))
    return torch.randint(vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(1))


def _logits_of_transformers(
    transformers: ModuleType,
    folder: Path,
    model_family: str | None,
    tokens: Tensor,
    types: Tensor | None,
    rounded_to: torch.dtype | None,
) -> list[Tensor]:
    try:
        config = read_config(folder)
        named = config["architectures"][0]
        if not hasattr(transformers, named):
            raise UserError(f"transformers {transformers.__version__} has no {named}: leave --verify out")
        is_causal = model_family in (None, "gpt") and (named not in TEXT_PARTS or TEXT_PARTS[named].is_causal)
        kind = "AutoModelForCausalLM" if is_causal else named
        model = getattr(transformers, kind).from_pretrained(
            folder,
            # The eager attention of transformers adds Falcon's ALiBi twice.
            attn_implementation="sdpa" if config.get("alibi") else "eager",
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,  # without it, transformers asks whether to run the folder's code
        )
    except UserError:
        raise
    except Exception as error:  # of any kind: it is another program's
        raise UserError(f"transformers cannot read {folder}: {type(error).__name__}: {error}") from error
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if rounded_to is not None:
        for weight in model.parameters():
            weight.copy_(weight.to(rounded_to))
    model.eval()
    if model_family == "t5":
        return [model(tokens, decoder_input_ids=tokens.flip(1), use_cache=False).logits]
    if model_family != "bert":
        return [model(tokens, use_cache=False).logits]
    outputs = model(tokens) if types is None else model(tokens, token_type_ids=types)
    both = "seq_relationship_logits" in outputs
    return [outputs.prediction_logits, outputs.seq_relationship_logits] if both else [outputs.logits]
