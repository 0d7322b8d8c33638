"""The bodies of /v1/completions and /v1/chat/completions, read and checked."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.core.inference.sampling import SamplingParams
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.generation import banned_sequences
from megatron.data.tokenizer.sft import SFTTokenizer
from megatron.serving.json_fields import JsonFields, bad_request

_MOST_LOGPROBS = 20
_MOST_CHOICES = 128
_MOST_TOKENS = 10**9
"""How many fit is checked with the length of the prompt."""
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields for the bookkeeping of OpenAI's own service."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    ids: tuple[int, ...]
    text: str | None
    """The text itself; None: the prompt was given as ids, or is a conversation."""


@dataclass(frozen=True)
class WritingRequest:
    """What a client asks for."""

    prompts: tuple[Prompt, ...]
    choices: int
    """Number of texts for each prompt."""
    max_new_tokens: int | None
    """None: the server's default."""
    sampling: SamplingParams
    stops: tuple[str, ...]
    ignores_ends: bool
    """Whether texts go on after end tokens."""
    num_logprobs: int | None
    echo: bool
    stream: bool
    includes_usage: bool
    """Whether the last part of a stream tells the number of tokens."""


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    tokenizer: Tokenizer
    chat: SFTTokenizer | None
    """The tokenizer with a chat template; None: the model does not chat."""
    no_chat: str
    """Why the model does not chat."""
    vocab_size: int
    ends: tuple[int, ...]
    """Ids that end a text."""
    chat_ends: tuple[int, ...]
    """Ids that end a turn."""
    max_tokens: int
    """Tokens of the longest prompt and text."""
    default_new_tokens: int


def read_completion(body: bytes, model: ServedModel) -> WritingRequest:
    """Reads a body of /v1/completions. Raises HttpError."""
    fields = JsonFields(body)
    prompts = _prompts(fields.value("prompt"), model)
    fields.only("suffix", None, "a suffix is not supported: the model continues a text; leave it out")
    best = fields.value("best_of")
    logprobs = fields.whole("logprobs", -1, 0, _MOST_LOGPROBS)
    echo = fields.switch("echo")
    request = _common(
        fields,
        model,
        prompts,
        max_new_tokens=fields.whole("max_tokens", 16, 0 if echo else 1, _MOST_TOKENS),
        num_logprobs=None if logprobs < 0 else logprobs,
        echo=echo,
    )
    if best is not None and best != request.choices:
        raise bad_request("best_of must be equal to n: all texts are returned; leave it out", "best_of")
    return request


def read_chat(body: bytes, model: ServedModel) -> WritingRequest:
    """Reads a body of /v1/chat/completions. Raises HttpError."""
    fields = JsonFields(body)
    if model.chat is None:
        raise bad_request(f"the model does not chat: {model.no_chat}; use /v1/completions", "messages", "no_chat")
    messages = _messages(fields.value("messages"))
    for name in ("tools", "tool_choice", "functions", "function_call", "audio", "modalities"):
        fields.only(name, ["text"] if name == "modalities" else None, "only text is written here; leave it out")
    fields.only("response_format", {"type": "text"}, 'the text has no format here; only {"type": "text"} works')
    wants = fields.switch("logprobs")
    top = fields.whole("top_logprobs", 0, 0, _MOST_LOGPROBS)
    if top and not wants:
        raise bad_request("top_logprobs needs logprobs true", "top_logprobs")
    older = fields.whole("max_tokens", 0, 1, _MOST_TOKENS)
    newer = fields.whole("max_completion_tokens", 0, 1, _MOST_TOKENS)
    try:
        ids = model.chat.encode_prompt(messages)
    except UserError as error:
        raise bad_request(f"messages: {error}", "messages") from None
    return _common(
        fields,
        model,
        (Prompt(tuple(ids), None),),
        max_new_tokens=newer or older or None,
        num_logprobs=top if wants else None,
        echo=False,
    )


def _common(
    fields: JsonFields,
    model: ServedModel,
    prompts: tuple[Prompt, ...],
    *,
    max_new_tokens: int | None,
    num_logprobs: int | None,
    echo: bool,
) -> WritingRequest:
    """Reads the fields that both bodies have."""
    named = fields.value("model")
    if named is not None and named != model.name:
        raise bad_request(
            f"model {str(named)[:80]!r} is not served here; {model.name!r} is", "model", "model_not_found"
        )
    options, stream = fields.value("stream_options"), fields.switch("stream")
    usage = options.get("include_usage", False) if isinstance(options, dict) else False
    if options is not None and (not isinstance(options, dict) or not isinstance(usage, bool) or not stream):
        raise bad_request('stream_options must be {"include_usage": true} with stream true', "stream_options")
    request = WritingRequest(
        prompts,
        fields.whole("n", 1, 1, _MOST_CHOICES),
        max_new_tokens,
        _sampling(fields, model),
        fields.texts("stop", 16),
        fields.switch("ignore_eos"),
        num_logprobs,
        echo,
        stream,
        usage,
    )
    fields.ignore(_NO_EFFECT)
    fields.finish()
    return request


def _sampling(fields: JsonFields, model: ServedModel) -> SamplingParams:
    temperature, top_k = fields.number("temperature", 1.0, 0, 100), fields.whole("top_k", 0, -1, model.vocab_size)
    seed = fields.whole("seed", -1, -(2**63), 2**64)
    try:
        return SamplingParams(
            temperature=temperature or 1.0,
            top_k=1 if temperature == 0 else max(0, top_k),
            top_p=fields.number("top_p", 1.0, 0, 1) or 1e-9,
            seed=secrets.randbits(62) if seed == -1 else seed,
            min_p=fields.number("min_p", 0.0, 0, 1),
            typical_p=fields.number("typical_p", 0.0, 0, 1),
            epsilon_cutoff=fields.number("epsilon_cutoff", 0.0, 0, 1),
            eta_cutoff=fields.number("eta_cutoff", 0.0, 0, 1),
            repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 100),
            no_repeat_ngram_size=fields.whole("no_repeat_ngram_size", 0, 0, 1000),
            bad_words=banned_sequences(model.tokenizer, fields.texts("bad_words", 100)),
            min_new_tokens=fields.whole("min_tokens", 0, 0, model.max_tokens),
            presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
            logit_bias=_logit_bias(fields.value("logit_bias"), model.vocab_size),
        )
    except UserError as error:
        raise bad_request(str(error), str(error).split()[0]) from None


def _logit_bias(found: object, vocab_size: int) -> dict[int, float]:
    message = f"logit_bias must map token ids below {vocab_size} to numbers from -100 to 100"
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > 1024:
        raise bad_request(message, "logit_bias")
    bias = {}
    for key, value in found.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size and is_number):
            raise bad_request(message, "logit_bias")
        bias[int(key)] = float(value)
    return bias


def encode(tokenizer: Tokenizer, text: str, param: str) -> list[int]:
    """Returns the ids of a text. Raises HttpError if the tokenizer refuses it."""
    try:
        return tokenizer.tokenize(text)
    except UserError as error:
        raise bad_request(f"{param}: {error}", param) from None


def _prompts(found: object, model: ServedModel) -> tuple[Prompt, ...]:
    """Returns the prompts: a text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(found, str):
        return (_of_text(found, model),)
    if isinstance(found, list) and found and len(found) <= _MOST_CHOICES:
        if all(isinstance(item, str) for item in found):
            return tuple(_of_text(item, model) for item in found)
        if all(isinstance(item, list) for item in found):
            return tuple(_of_ids(item, model.vocab_size) for item in found)
    if isinstance(found, list) and found and all(isinstance(item, int) for item in found):
        return (_of_ids(found, model.vocab_size),)
    raise bad_request(
        f"prompt must be a text, a list of token ids, or a list of at most {_MOST_CHOICES} of either", "prompt"
    )


def _of_text(text: str, model: ServedModel) -> Prompt:
    return Prompt(tuple(encode(model.tokenizer, text, "prompt") or [model.tokenizer.eod]), text)


def _of_ids(ids: Collection[object], vocab_size: int) -> Prompt:
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
        raise bad_request(f"prompt: a list of ids must have at least one, all from 0 to {vocab_size - 1}", "prompt")
    return Prompt(tuple(ids), None)  # type: ignore[arg-type]


def _messages(found: object) -> list[dict[str, object]]:
    """Returns the messages, whose contents are texts: a list of text parts is joined."""
    if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
        raise bad_request("messages must be a list of at least one object with role and content", "messages")
    messages = []
    for number, item in enumerate(found):
        content = item.get("content", "")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(item.get("role"), str) or not isinstance(content, str):
            raise bad_request(f"messages[{number}] must have a role and a content of text", "messages")
        messages.append({**item, "content": content})
    return messages
