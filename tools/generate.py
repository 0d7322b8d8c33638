"""Let a trained model continue prompts.

python tools/generate.py --load runs/quickstart/checkpoints --prompt "def " --max-new-tokens 100 --temperature 0.8

The model and its tokenizer are those that the checkpoint says it was trained with. docs/quickstart.md says more.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config_fields import flag
from megatron.core.exceptions import UserError
from megatron.core.inference.generation import generate
from megatron.core.inference.sampling import GREEDY, SamplingParams
from megatron.training.config.tool_flags import Section, read_tool_flags
from megatron.training.tokenizer.base import Tokenizer
from megatron.training.trained_model import TrainedModel, load_trained_model
from pretrain_gpt import build_model

USAGE = "python tools/generate.py --load DIR --prompt TEXT ... [flags]"
ABOUT = (
    "Let a trained model continue prompts. Without --top-k, --top-p and --temperature it always writes the likeliest "
    "token. What is written to a prompt depends on the model, the flags, and the prompt's place among the prompts."
)


@dataclass(kw_only=True, frozen=True)
class GenerationConfig:
    """What tools/generate.py is told."""

    load: str | None = None
    """Folder of checkpoints, as a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint; the newest whole one when not given."""

    prompt: list[str] | None = flag(None, gathers=True)
    """Texts to continue; may be given several times."""

    prompts_file: str | None = None
    """File of texts to continue, one a line; continued after those of --prompt."""

    max_new_tokens: int = 100
    """Tokens to write to each prompt, at most: it ends where the model ends the document."""

    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all; 1: take the likeliest."""

    top_p: float = 0.0
    """Draw from the likeliest tokens that together reach this probability; 0: from all."""

    temperature: float | None = None
    """Divide logits by this before drawing: below 1 for what is likely, above 1 for what is not. 1 when not given and
    tokens are drawn."""

    seed: int = 1234
    """Seed of the draws."""

    batch_size: int = 16
    """Prompts that are continued at once. It does not change what is written."""

    vocab_file: str | None = None
    """Vocabulary, where it is no longer where the run found it."""

    merge_file: str | None = None
    """Merges, where they are no longer where the run found them."""

    tokenizer_model: str | None = None
    """Tokenizer, where it is no longer where the run found it."""

    echo: bool = flag(True, off="--no-echo")
    """Print the prompt before what follows it."""

    def sampling(self) -> SamplingParams:
        """How tokens are chosen. Raises UserError for impossible values."""
        if self.temperature is None and not self.top_k and not self.top_p:
            return GREEDY
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(temperature, self.top_k, self.top_p, self.seed)


def problems_of(config: GenerationConfig) -> Iterator[str]:
    """What is missing or impossible."""
    if config.load is None:
        yield "{load:name} is required"
    if not config.prompt and config.prompts_file is None:
        yield "{prompt:name} or {prompts_file:name} is required"
    for name in ("max_new_tokens", "batch_size"):
        if getattr(config, name) < 1:
            yield f"{{{name}}} must be at least 1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    sections = [Section("generation", GenerationConfig, lambda config: list(problems_of(config)))]
    try:
        flags = read_tool_flags(sys.argv[1:] if argv is None else argv, sections, USAGE, ABOUT)
        (config,) = flags.configs
        write(config)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


def write(config: GenerationConfig) -> None:
    """Load the model, continue the prompts batch by batch, and print each as soon as its batch is done."""
    sampling, texts = config.sampling(), read_prompts(config)
    trained = load_trained_model(build_model, config.load or "", config.ckpt_step, moved_tokenizer(config), say=note)
    note(f"{config.load}: iteration {trained.iteration}, on {trained.device}")
    prompts = [encode(trained, text, config.max_new_tokens) for text in texts]
    reached = max((len(prompt) for prompt in prompts), default=0) + config.max_new_tokens
    if reached > trained.max_sequence_length:
        note(f"up to {reached} tokens a row: the model was trained for {trained.max_sequence_length}")
    for first in range(0, len(prompts), config.batch_size):
        batch = slice(first, first + config.batch_size)
        written = generate(
            trained.model,
            prompts[batch],
            config.max_new_tokens,
            sampling,
            end=trained.tokenizer.eod,
            first_sequence=first,
        )
        for text, prompt, ids in zip(texts[batch], prompts[batch], written, strict=True):
            text_after = continuation(trained.tokenizer, prompt if text else [], ids)
            print((text if config.echo else "") + text_after, flush=True)


def read_prompts(config: GenerationConfig) -> list[str]:
    """All texts to continue, in order."""
    texts = list(config.prompt or [])
    if config.prompts_file is not None:
        try:
            texts += Path(config.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts-file {config.prompts_file}: {error}") from error
    return texts


def encode(trained: TrainedModel, text: str, max_new_tokens: int) -> list[int]:
    """Ids of a prompt; an empty one is the end of a document, after which a new one begins."""
    try:
        ids = trained.tokenizer.tokenize(text) or [trained.tokenizer.eod]
    except UserError as error:
        raise UserError(f"prompt {text!r}: {error}") from error
    longest = trained.max_sequence_length
    if trained.config.model.position_embedding_type == "learned_absolute" and len(ids) + max_new_tokens > longest:
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: a prompt has {len(ids)} tokens, the model {longest} positions; "
            f"{max(0, longest - len(ids))} new tokens work"
        )
    return ids


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` as it follows that of the prompt: by themselves they may lose the blank between the two, as
    those of SentencePiece and of NullTokenizer do."""
    before, whole = tokenizer.detokenize(prompt), tokenizer.detokenize([*prompt, *ids])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(ids)


def moved_tokenizer(config: GenerationConfig) -> list[str]:
    """The tokenizer's new place, as words of a command line."""
    places = {
        "--vocab-file": config.vocab_file,
        "--merge-file": config.merge_file,
        "--tokenizer-model": config.tokenizer_model,
    }
    return [word for name, place in places.items() if place is not None for word in (name, place)]


def note(sentence: str) -> None:
    """Tell the user something that is no result."""
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
