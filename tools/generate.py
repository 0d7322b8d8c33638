"""Continues prompts with a trained model, or fills the masks of prompts with a BERT.

python tools/generate.py --load runs/quickstart/checkpoints --prompt "def " --max-new-tokens 100 --temperature 0.8
python tools/generate.py --load runs/bert --prompt "the loss of the [MASK] is printed"
python tools/generate.py --load runs/t5 --prompt "the <extra_id_0> of the run is printed"

python tools/generate.py --load runs/tuned --chat
torchrun --nproc_per_node 2 tools/generate.py --load runs/large --prompt "def " --tensor-model-parallel-size 2

The checkpoint describes the model and the tokenizer. See docs/quickstart.md.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.conversion.hub_run import load_hub_weights
from megatron.conversion.tokenizer_files import end_ids
from megatron.core.declarations.config_fields import flag
from megatron.core.exceptions import UserError
from megatron.core.inference.encoder_decoder_generation import generate_from_encoder
from megatron.core.inference.generation import generate
from megatron.core.inference.mask_filling import fill_masks
from megatron.core.inference.sampling import GREEDY, SamplingParams
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.generation import banned_sequences, chat_tokenizer
from megatron.training.config.inference_layout import InferenceLayout
from megatron.training.config.tool_flags import Section, read_tool_flags
from megatron.training.trained_model import TrainedModel, open_trained_model
from tools.entry_scripts import build_model, words_given_again

USAGE = "python tools/generate.py --load DIR --prompt TEXT ... [flags]"
ABOUT = (
    "Continues prompts with a trained model. Without --top-k, --top-p and --temperature, it always takes the most "
    "likely token. The continuation of a prompt depends on the model, the flags, and the index of the prompt. A BERT "
    "fills each [MASK] of a prompt with the most likely token instead. The encoder of a T5 reads the prompt, and its "
    "decoder writes the text. With --chat, prompts are the user's turns of a conversation."
)
MASK = "[MASK]"
"""Stands for a masked token in a prompt."""


@dataclass(kw_only=True, frozen=True)
class GenerationConfig:
    """Flags of the tool."""

    load: str | None = None
    """Folder of checkpoints, as in a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    base: str | None = None
    """Folder of the model that adapters belong to (--lora-rank), if it has moved since the run."""

    prompt: list[str] | None = flag(None, gathers=True)
    """Text to continue, or to fill. May be given several times."""

    prompts_file: str | None = None
    """File with one text to continue on each line, after those of --prompt."""

    chat: bool = False
    """Answer as the assistant, by the chat template of the tokenizer. The prompts are the turns of the user in one
    conversation; without prompts they are lines of the standard input."""

    system: str | None = None
    """With --chat: the system's message, which begins the conversation."""

    chat_template: str | None = None
    """With --chat: file with a Jinja template. Default: that of the run, or of the tokenizer's folder."""

    max_new_tokens: int = 100
    """Largest number of tokens to add to a prompt. A continuation ends earlier where the model ends the document."""

    top_k: int = 0
    """Sample from the k most likely tokens. 0: from all; 1: always take the most likely token."""

    top_p: float = 0.0
    """Sample from the most likely tokens that reach this probability together. 0: from all."""

    temperature: float | None = None
    """Divide logits by this before sampling. Values below 1 favour likely tokens, values above 1 unlikely ones. Default
    if tokens are sampled: 1."""

    seed: int = 1234
    """Seed of the samples."""

    min_p: float = 0.0
    """Leave out tokens with less than this share of the probability of the most likely token."""

    typical_p: float = 0.0
    """Sample from the most typical tokens that reach this probability together. 0: from all."""

    epsilon_cutoff: float = 0.0
    """Leave out tokens of a lower probability."""

    eta_cutoff: float = 0.0
    """Leave out tokens of a lower probability than this, or than its root times exp(-entropy)."""

    repetition_penalty: float = 1.0
    """Divide the positive logits of tokens that the text has already by this, and multiply negative ones."""

    no_repeat_ngram_size: int = 0
    """Write no sequence of this many tokens twice. 0: no limit."""

    bad_words: list[str] | None = flag(None, nargs="*")
    """Texts that are never written, neither alone nor after a blank."""

    min_new_tokens: int = 0
    """Number of tokens before a continuation may end."""

    batch_size: int = 16
    """Number of prompts that are continued at once. It does not change the continuations."""

    ema: bool = False
    """Use the moving average of the weights (--ema-decay of the run)."""

    vocab_file: str | None = None
    """Vocabulary file, if it has moved since the run."""

    merge_file: str | None = None
    """File of merges, if it has moved since the run."""

    tokenizer_model: str | None = None
    """Tokenizer, if it has moved since the run."""

    spec: list[str] | None = flag(None, nargs="*")
    """Module and name of the layers, for a model that was trained with --spec. No code is taken from a checkpoint, so
    give it again."""

    echo: bool = flag(True, off="--no-echo")
    """Print the prompt before its continuation."""

    def sampling(self, tokenizer: Tokenizer | None = None) -> SamplingParams:
        """Returns how tokens are chosen. Raises UserError for impossible values."""
        cuts = self.top_k, self.top_p, self.min_p, self.typical_p, self.epsilon_cutoff, self.eta_cutoff
        is_greedy = self.temperature is None and not any(cuts)
        try:
            return SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=1 if is_greedy else self.top_k,
                top_p=self.top_p,
                seed=self.seed,
                min_p=self.min_p,
                typical_p=self.typical_p,
                epsilon_cutoff=self.epsilon_cutoff,
                eta_cutoff=self.eta_cutoff,
                repetition_penalty=self.repetition_penalty,
                no_repeat_ngram_size=self.no_repeat_ngram_size,
                bad_words=() if tokenizer is None else banned_sequences(tokenizer, self.bad_words or ()),
                min_new_tokens=self.min_new_tokens,
            )
        except UserError as error:
            names = re.compile("|".join(field.name for field in dataclasses.fields(SamplingParams)))
            spelled = names.sub(lambda name: "--" + name[0].replace("_", "-"), str(error), count=1)
            raise UserError(spelled.replace("top_k", "--top-k")) from None


def problems_of(config: GenerationConfig) -> Iterator[str]:
    """Yields a problem for each flag that is missing or impossible."""
    if config.load is None:
        yield "{load:name} is required"
    if not config.prompt and config.prompts_file is None and not config.chat:
        yield "{prompt:name} or {prompts_file:name} is required"
    for name in ("system", "chat_template"):
        if getattr(config, name) is not None and not config.chat:
            yield f"{{{name}:name}} needs {{chat:name}}"
    if config.bad_words is not None and not all(config.bad_words):
        yield "{bad_words:name}: a text is empty; leave it out"
    for name in ("max_new_tokens", "batch_size"):
        if getattr(config, name) < 1:
            yield f"{{{name}}} must be at least 1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    sections = [
        Section("generation", GenerationConfig, lambda config: list(problems_of(config))),
        Section("layout", InferenceLayout),
    ]
    try:
        config, layout = read_tool_flags(sys.argv[1:] if argv is None else argv, sections, USAGE, ABOUT)
        write(config, layout)
    except UserError as error:
        for line in str(error).splitlines():
            note(f"error: {line}")
        return 2
    return 0


def write(config: GenerationConfig, layout: InferenceLayout) -> None:
    """Loads the model, continues the prompts batch by batch, and prints each batch when it is done."""
    config.sampling()  # finds mistakes before the model is loaded
    texts, words = read_prompts(config), words_given_again(config)
    if config.chat and not texts and layout.num_ranks > 1:
        raise UserError("--chat: several ranks cannot share the standard input; give the turns with --prompt")
    place = config.load or ""
    with open_trained_model(
        build_model,
        place,
        config.ckpt_step,
        words,
        log=note,
        average=config.ema,
        layout=layout,
        base=config.base,
        load_hub=load_hub_weights,
    ) as trained:
        note(f"{config.load}: iteration {trained.iteration}, on {trained.device}")
        write_texts(trained, texts, config)


def write_texts(trained: TrainedModel, texts: Sequence[str], config: GenerationConfig) -> None:
    """Continues the prompts with a model of any family."""
    if config.chat:
        return write_answers(trained, texts or map(str.rstrip, sys.stdin), config)
    if trained.config.model.model_family == "bert":
        return write_filled(trained, texts, config)
    if trained.config.model.model_family == "t5":
        return write_decoded(trained, texts, config)
    sampling = config.sampling(trained.tokenizer)
    prompts = [encode(trained, text, config.max_new_tokens) for text in texts]
    reached = max((len(prompt) for prompt in prompts), default=0) + config.max_new_tokens
    if reached > trained.max_sequence_length:
        note(f"sequences may reach {reached} tokens, but the model was trained for {trained.max_sequence_length}")
    for first in range(0, len(prompts), config.batch_size):
        batch = slice(first, first + config.batch_size)
        written = generate(
            trained.model,
            prompts[batch],
            config.max_new_tokens,
            sampling,
            ends=end_ids(trained.config.tokenizer, trained.tokenizer),
            first_sequence=first,
        )
        for text, prompt, ids in zip(texts[batch], prompts[batch], written, strict=True):
            text_after = continuation(trained.tokenizer, prompt if text else [], ids)
            show((text if config.echo else "") + text_after)


def write_answers(trained: TrainedModel, turns: Iterable[str], config: GenerationConfig) -> None:
    """Prints the assistant's answer to each turn of the user, in one conversation. Raises UserError for a model or a
    tokenizer that does not chat."""
    flags = trained.config.tokenizer
    if trained.config.model.model_family not in ("gpt", "hybrid"):
        raise UserError(f"--chat: a {trained.config.model.model_family} does not continue conversations")
    try:
        tokenizer = chat_tokenizer(flags, config.chat_template)
    except UserError as error:
        raise UserError(f"--chat: {error}") from None
    ends = [*end_ids(flags, tokenizer), *([] if (end := tokenizer.turn_end()) is None else [end])]
    sampling = config.sampling(tokenizer)
    messages = [] if config.system is None else [{"role": "system", "content": config.system}]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        prompt = check_length(trained, tokenizer.encode_prompt(messages), config.max_new_tokens)
        (ids,) = generate(trained.model, [prompt], config.max_new_tokens, sampling, ends=ends, first_sequence=number)
        answer = tokenizer.detokenize(ids)
        messages.append({"role": "assistant", "content": answer})
        show(answer)


def write_decoded(trained: TrainedModel, texts: Sequence[str], config: GenerationConfig) -> None:
    """Prints the text that the decoder of a T5 writes for each prompt of its encoder, batch by batch; with --no-echo
    without the prompt."""
    tokenizer, sampling = trained.tokenizer, config.sampling(trained.tokenizer)
    begin = tokenizer.pad if tokenizer.bos is None else tokenizer.bos
    if begin is None:
        raise UserError(f"the tokenizer of {trained.config.tokenizer.family} has no token that begins a decoder's text")
    ends = end_ids(trained.config.tokenizer, tokenizer)
    longest = trained.max_sequence_length
    learned = trained.config.model.position_embedding_type == "learned_absolute"
    if learned and config.max_new_tokens > longest:
        raise UserError(f"--max-new-tokens {config.max_new_tokens}: the model has {longest} positions")
    prompts = [encode(trained, text, 0) for text in texts]
    for first in range(0, len(prompts), config.batch_size):
        batch = slice(first, first + config.batch_size)
        written = generate_from_encoder(
            trained.model,  # type: ignore[arg-type]
            prompts[batch],
            begin,
            config.max_new_tokens,
            sampling,
            ends=ends,
            first_sequence=first,
        )
        for text, ids in zip(texts[batch], written, strict=True):
            print((f"{text} " if config.echo else "") + tokenizer.detokenize(ids), flush=True)


def write_filled(trained: TrainedModel, texts: Sequence[str], config: GenerationConfig) -> None:
    """Prints the texts with their masks filled, batch by batch; with --no-echo the words that fill them."""
    if config.sampling() != GREEDY:
        note("--top-k, --top-p and --temperature have no effect: BERT fills masks with the most likely tokens")
    rows = [encode_masked(trained, text) for text in texts]
    mask = trained.tokenizer.mask
    for first in range(0, len(rows), config.batch_size):
        batch = slice(first, first + config.batch_size)
        filled = fill_masks(trained.model, rows[batch], mask)  # type: ignore[arg-type]
        for text, row, ids in zip(texts[batch], rows[batch], filled, strict=True):
            words = [trained.tokenizer.detokenize([new]) for new, old in zip(ids, row, strict=True) if old == mask]
            parts = text.split(MASK)
            whole = "".join(part + word for part, word in zip(parts, [*words, ""], strict=True))
            print(whole if config.echo else " ".join(words), flush=True)


def encode_masked(trained: TrainedModel, text: str) -> list[int]:
    """Returns the ids of [CLS], the text with its masks, and [SEP]. Raises UserError for a text without masks, for one
    that is too long, and for a tokenizer without these tokens."""
    tokenizer, parts = trained.tokenizer, text.split(MASK)
    if len(parts) == 1:
        raise UserError(f"prompt {text!r}: a BERT fills masks, and there is no {MASK} in it")
    cls, mask, sep = tokenizer.cls, tokenizer.mask, tokenizer.sep
    if cls is None or mask is None or sep is None:
        raise UserError(f"the tokenizer of {trained.config.tokenizer.family} lacks [CLS], [MASK] or [SEP]")
    ids = [cls, *tokenizer.tokenize(parts[0])]
    for part in parts[1:]:
        ids += [mask, *tokenizer.tokenize(part)]
    if len(ids) + 1 > trained.max_sequence_length:
        longest = trained.max_sequence_length
        raise UserError(f"prompt {text!r}: {len(ids) + 1} tokens, and the model has {longest} positions; shorten it")
    return [*ids, sep]


def read_prompts(config: GenerationConfig) -> list[str]:
    """Returns all texts to continue, in order. Raises UserError if the file cannot be read."""
    texts = list(config.prompt or [])
    if config.prompts_file is not None:
        try:
            with open(config.prompts_file, encoding="utf-8") as file:  # str.splitlines would cut at U+2028, too
                texts += [line.removesuffix("\n") for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts-file {config.prompts_file}: {error}") from error
    return texts


def encode(trained: TrainedModel, text: str, max_new_tokens: int) -> list[int]:
    """Returns the token ids of a prompt. An empty prompt becomes the end-of-document token, after which a document
    begins.

    Raises UserError if the tokenizer refuses the text, or if the model has too few positions.
    """
    try:
        ids = trained.tokenizer.tokenize(text) or [trained.tokenizer.eod]
    except UserError as error:
        raise UserError(f"prompt {text!r}: {error}") from error
    return check_length(trained, ids, max_new_tokens)


def check_length(trained: TrainedModel, ids: list[int], max_new_tokens: int) -> list[int]:
    """Returns the ids of a prompt. Raises UserError if the model has too few positions for them and the new tokens."""
    longest = trained.max_sequence_length
    if trained.config.model.position_embedding_type == "learned_absolute" and len(ids) + max_new_tokens > longest:
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: a prompt has {len(ids)} tokens and the model has {longest} positions; "
            f"--max-new-tokens {max(0, longest - len(ids))} works"
        )
    return ids


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of `ids` after the prompt's text.

    Decoding `ids` alone may lose the blank between the two, for example with SentencePiece and NullTokenizer.
    """
    before, whole = tokenizer.detokenize(prompt), tokenizer.detokenize([*prompt, *ids])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(ids)


def note(sentence: str) -> None:
    """Prints a message that is not a result, to stderr. Only the first rank prints."""
    if is_first_rank():
        print(sentence, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints a result. Only the first rank prints."""
    if is_first_rank():
        print(text, flush=True)


def is_first_rank() -> bool:
    """Whether this process prints."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    run_main(main)
