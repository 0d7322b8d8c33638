"""SFTTokenizer: a Hugging Face tokenizer that also encodes conversations by a chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import load_library
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer

_IDENTITY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_LEARNED_ROLE = "assistant"

Message = Mapping[str, Any]
"""A turn of a conversation: `role` (system, user, assistant, ...) and `content`."""


class SFTTokenizer(HuggingFaceTokenizer):
    """A HuggingFaceTokenizer with a chat template, for --sft.

    The template is `chat_template` (a file), or that of the tokenizer's folder (chat_template.jinja, or the entry of
    tokenizer_config.json). It runs in Jinja's sandbox. `prompt_format` "identity" joins the contents instead.
    """

    type_name = "SFTTokenizer"

    def __init__(self, path: str, prompt_format: str = "default", chat_template: str | None = None) -> None:
        super().__init__(path)
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self._template_text = _IDENTITY if prompt_format == "identity" else _find_template(folder, chat_template)
        self._config_tokens = _special_texts(folder)
        self._template: Any = None

    def encode_conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Returns the ids of a conversation, and for each whether it belongs to an assistant's turn.

        A turn is the text that the template adds after the turn's prompt (`add_generation_prompt`), including the end
        mark. Raises UserError if the template rejects the conversation, or if the conversation has no such turn.
        """
        text = self._render(messages, False)
        spans = [self._span(messages, at, text) for at, turn in enumerate(messages) if turn["role"] == _LEARNED_ROLE]
        encoding = self._library.encode(text, add_special_tokens=False)
        learned = [any(first <= begin < last for first, last in spans) for begin, _ in encoding.offsets]
        if not any(learned):
            raise UserError(f"no turn to learn from: none of the {len(messages)} turns has the role {_LEARNED_ROLE}")
        return encoding.ids, learned

    def _span(self, messages: Sequence[Message], at: int, text: str) -> tuple[int, int]:
        """Returns the first and last position of a turn in the text of the conversation."""
        before, after = self._render(messages[:at], True), self._render(messages[: at + 1], False)
        if after.startswith(before) and text.startswith(after):
            return len(before), len(after)
        content = str(messages[at]["content"]).strip()
        first = text.find(content, min(len(before), len(text)) if text.startswith(before) else 0)
        if first < 0 or not content or text.count(content) > 1:
            raise UserError(f"the chat template changes turn {at + 1} after later turns, so its tokens cannot be found")
        return first, first + len(content)

    def _render(self, messages: Sequence[Message], prompt: bool) -> str:
        if not messages:
            return ""
        jinja2 = load_library("jinja2")
        if self._template is None:
            sandbox = load_library("jinja2.sandbox").ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            sandbox.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
            sandbox.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
            try:
                self._template = sandbox.from_string(self._template_text)
            except jinja2.TemplateError as error:
                raise UserError(f"the chat template is not a Jinja template: {error}") from None
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._config_tokens)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template rejects the conversation: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_template": None}

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"template": self._template_text}


def _raise(message: str) -> NoReturn:
    raise load_library("jinja2").TemplateError(message)


def _read(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / name
    try:
        return json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path}: not JSON in UTF-8: {error}") from None


def _special_texts(folder: Path) -> dict[str, str]:
    """Returns the spellings of the special tokens by role, which templates use."""
    found = {**_read(folder, "special_tokens_map.json"), **_read(folder, "tokenizer_config.json")}
    tokens = {role: found.get(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {role: token["content"] if isinstance(token, dict) else token or "" for role, token in tokens.items()}


def _find_template(folder: Path, file: str | None) -> str:
    try:
        if file is not None:
            return Path(file).read_text("utf-8")
        if (folder / "chat_template.jinja").exists():
            return (folder / "chat_template.jinja").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {file or folder / 'chat_template.jinja'}: {error}") from None
    template = _read(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not template:
        raise UserError(
            f"--tokenizer-model {folder}: has no chat template; give --chat-template FILE, or "
            "--sft-tokenizer-prompt-format identity to join the contents of the turns"
        )
    return template
