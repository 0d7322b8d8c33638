"""SFTTokenizer: a Hugging Face tokenizer that also encodes conversations by a chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.tokenizer.chat_template import THOUGHTS, ChatTemplate
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.data.tokenizer.huggingface_files import read_json_object
from megatron.data.tokenizer.learned_turns import LEARNED_ROLE, LearnedTurns, Message

_NEMOTRON = r"""
{% for message in messages %}
{% set role, text = message['role'], message['content'] | default('', true) | trim %}
{% if role == 'system' %}{{ '<SPECIAL_10>System\n' + text + '\n' }}
{%- elif role == 'user' %}{{ '<SPECIAL_11>User\n' + text + '\n' + after_user }}
{%- elif role == 'assistant' and text %}
{{ before_answer }}{% generation %}{{ text + '\n' + end }}{% endgeneration %}
{%- else %}{{ raise_exception('the prompt format has no empty turn of the assistant, and no role ' + role) }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ before_answer }}{% endif %}
"""
_HEADER = r"'<SPECIAL_11>Assistant\n'"
_FORMATS = {
    "identity": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "nemotron-h-aligned": f"{{% set after_user, before_answer, end = {_HEADER}, '', '' %}}{_NEMOTRON}",
    "nemotron-nano-v2": rf"{{% set after_user, before_answer, end = '', {_HEADER}, '<SPECIAL_12>\n' %}}{_NEMOTRON}",
}
"""Chat templates by prompt format. Those of Nemotron write what Megatron-LM 0.19.2 wrote for the same conversations,
when it was run, and mark what it learned."""
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_ALWAYS_READ = ("role", "content", "add_generation_prompt", "chat_template_kwargs")


class SFTTokenizer(HuggingFaceTokenizer):
    """A HuggingFaceTokenizer with a chat template, for --sft.

    The template is `chat_template` (a file), or that of the tokenizer's folder (chat_template.jinja, or the entry of
    tokenizer_config.json; an entry named tool_use is for conversations with tools). It runs in Jinja's sandbox.
    Other values of `prompt_format` than "default" replace it: "identity" joins the contents, and the others write turns
    as these models do.
    """

    type_name = "SFTTokenizer"

    def __init__(self, path: str, prompt_format: str = "default", chat_template: str | None = None) -> None:
        super().__init__(path)
        own = _FORMATS.get(prompt_format)
        self._sources = _find_templates(self._file.parent, chat_template) if own is None else {_DEFAULT: own}
        self._made: dict[str, tuple[ChatTemplate, LearnedTurns]] = {}

    def encode_conversation(
        self, messages: Sequence[Message], fields: Mapping[str, Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of a conversation, and for each whether it is learned: it belongs to what the assistant
        writes (content, thoughts, calls of tools, the mark that ends the turn), or to a part inside of the template's
        {% generation %}. The value is 0 if not, and otherwise 1 plus the index of the turn's kind in `TURN_KINDS`.

        `fields` are variables for the template, such as tools, documents or enable_thinking; `chat_template_kwargs`
        holds more of them. Raises UserError if the template rejects the conversation, or if nothing in it is learned.
        """
        template, turns, known = self._template_for(_variables(fields or {}))
        text, spans = turns.find(messages, {**self._special_texts, "add_generation_prompt": False, **known})
        if template.writes_the_date:
            warn_on_first_rank(
                "the chat template writes the date of today into conversations, so that a run on another day learns "
                f"other text; {_names_of_dates(template)}"
            )
        encoding = self._encoding(text, False)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learned = np.zeros(len(begins), np.int8)
        for (first, last), kind in spans:
            learned[(begins < last) & (ends > first)] = 1 + kind
        if not learned.any():
            raise UserError(f"no turn to learn from: {_why_nothing_is_learned(messages, template)}")
        return encoding.ids, learned.tolist()

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a conversation that asks for a turn of the assistant. Raises UserError if the template
        rejects it."""
        template, _, _ = self._template_for({})
        variables = {**self._special_texts, "add_generation_prompt": True}
        return self._encoding(template.render(messages, variables), False).ids

    def turn_end(self) -> int | None:
        """Returns the special token that ends a turn of the assistant; None if the template writes no such token."""
        talk = [{"role": "user", "content": "a"}, {"role": LEARNED_ROLE, "content": "a"}]
        ids, learned = self.encode_conversation(talk)
        special = {self._library.token_to_id(literal) for literal in self.special_literals}
        return next((i for i, learns in zip(ids[::-1], learned[::-1], strict=True) if learns and i in special), None)

    def _template_for(self, variables: Mapping[str, object]) -> tuple[ChatTemplate, LearnedTurns, dict[str, object]]:
        """Returns the template for a conversation with these variables, and those of them that it reads."""
        name = _WITH_TOOLS if variables.get("tools") is not None and _WITH_TOOLS in self._sources else _DEFAULT
        template, turns = self._template(name)
        return template, turns, {key: value for key, value in variables.items() if key in template.variables}

    def unread_fields(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> set[str]:
        """Returns the names of the fields of a row, and of its turns, that the template does not read."""
        variables = {name for source in self._sources for name in self._template(source)[0].variables}
        names = {*fields, *(fields.get("chat_template_kwargs") or {})} - variables
        for message in messages:
            names |= {key for key in message if not any(self._reads(source, key) for source in self._sources.values())}
        return names - set(_ALWAYS_READ)

    @staticmethod
    def _reads(source: str, key: str) -> bool:
        return any(name in source for name in (THOUGHTS if key in THOUGHTS else (key,)))

    def _template(self, name: str) -> tuple[ChatTemplate, LearnedTurns]:
        if name not in self._made:
            template = ChatTemplate(self._sources[name])
            end = self._special_texts.get("eos_token", "")
            self._made[name] = template, LearnedTurns(template, self.special_literals, end)
        return self._made[name]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_made": {}}

    def _identity(self) -> dict[str, object]:
        return super()._identity() | {"template": self._sources}


def _variables(fields: Mapping[str, object]) -> dict[str, object]:
    """Returns the variables of a template. Raises UserError for values that have another form than in transformers."""
    more = fields.get("chat_template_kwargs") or {}
    if not isinstance(more, Mapping):
        raise UserError('"chat_template_kwargs" is not an object')
    variables = {**fields, **more}
    for name in ("tools", "documents"):
        value = variables.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
            raise UserError(f'"{name}" is not a list of objects')
    if variables.get("add_generation_prompt"):
        raise UserError('"add_generation_prompt" is true, and a conversation to learn from ends with its last turn')
    return variables


def _names_of_dates(template: ChatTemplate) -> str:
    names = sorted(name for name in template.variables if "date" in name)
    return f"a field {' or '.join(names)} in each line may give one" if names else "it has no variable for another one"


def _why_nothing_is_learned(messages: Sequence[Message], template: ChatTemplate) -> str:
    if template.has_generation_tag:
        return "the chat template has nothing inside of {% generation %} for it"
    if all(message["role"] != LEARNED_ROLE for message in messages):
        return f"none of the {len(messages)} turns has the role {LEARNED_ROLE}"
    return f"the chat template writes nothing for turns of the role {LEARNED_ROLE}"


def _find_templates(folder: Path, given: str | None) -> dict[str, str]:
    """Returns the templates by name: that of a file, or those of the tokenizer's folder."""
    file = folder / "chat_template.jinja" if given is None else Path(given)
    try:
        if given is not None or file.exists():
            return {_DEFAULT: file.read_text("utf-8")}
    except (OSError, ValueError) as error:
        place = f"--chat-template {given}" if given is not None else str(file)
        raise UserError(f"{place}: {getattr(error, 'strerror', None) or error}") from None
    config = folder / "tokenizer_config.json"
    template = read_json_object(config).get("chat_template")
    if isinstance(template, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in template]
        template = {entry.get("name", ""): entry.get("template") for entry in entries}
    found: dict[Any, Any] = template if isinstance(template, dict) else {_DEFAULT: template}
    if not found.get(_DEFAULT):
        raise UserError(
            f"--tokenizer-model {folder}: has no chat template; give --chat-template FILE, or "
            "--sft-tokenizer-prompt-format identity to join the contents of the turns"
        )
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in found.items()):
        raise UserError(f"{config}: chat_template is not a text, or a list of templates with name and template")
    return {name: source for name, source in found.items() if name in (_DEFAULT, _WITH_TOOLS)}
