"""megatron/data/tokenizer/chat_template.py: texts as transformers renders them; templates that go wrong are one
sentence."""

import json
import time

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer import chat_template
from megatron.data.tokenizer.chat_template import ChatTemplate

TALK = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "reasoning": "so"},
    {"role": "tool", "content": {"value": 1.5}},
    {"role": "assistant", "content": "<é>", "name": None},
]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | tojson if m.content is defined else m.keys() | list }};{% endfor %}",
        "{% for m in messages %}{{ m | tojson(indent=2, sort_keys=true) }}\n   {% if 1 %}\nx{% endif %}\n{% endfor %}",
        "{{ messages | map(attribute='role') | join(' ~ ') ~ (tools is none) ~ (documents is none) ~ true }}",
        "{% for m in messages recursive %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{{ m.thinking }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% else %}none{% endfor %}{{ m is defined }}",
        "{% set n = namespace(v=2) %}{% for i in [1, 2] if i %}{% set n.v = n.v ** 2 * 3 % 50 %}{% endfor %}{{ n.v }}",
        "{% macro f(a, b=1) %}{{ a ~ b }}{{ caller() if caller }}{% endmacro %}{% call f(1) %}{{ f(2) }}{% endcall %}",
        "{% for part in messages[0].content %}{{ part.text | upper }}{{ loop.nextitem is defined }}{% endfor %}",
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}{{ 'a' * 3 + 'b' }}{{ [1] * 2 }}",
    ],
)
def test_texts_of_transformers(template):
    from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

    theirs = render_jinja_template([_normalize_chat_messages(TALK)], chat_template=template)[0][0]
    ours = ChatTemplate(template)
    text = ours.render(TALK, {"add_generation_prompt": False})
    assert text == theirs
    assert ours.render_with_turns(TALK, {"add_generation_prompt": False}, text).text == theirs


def test_turns_and_generated_parts():
    ours = ChatTemplate(
        "{% for m in messages %}{{ m.role[0] }}{% for m in messages[1:2] %}{% endfor %}"
        "{% generation %}x{% endgeneration %}{% endfor %}end{% for m in messages[:1] %}{{ m.role }}{% endfor %}"
    )
    text = ours.render(TALK, {})
    assert text == "uxaxtxaxenduser"
    rendered = ours.render_with_turns(TALK, {}, text)
    assert rendered.turns == [[(0, 2), (11, 15)], [(2, 4)], [(4, 6)], [(6, 8)]]
    assert rendered.generated == [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_variables_are_names_that_a_template_does_not_set():
    ours = ChatTemplate("{% set a = b %}{{ a }}{% for i in range(2) %}{{ tools }}{% endfor %}{{ raise_exception }}")
    assert ours.variables == {"b", "tools"}


def test_a_null_content_is_none_and_writes_nothing():
    talk = [{"role": "assistant", "content": None, "tool_calls": []}]
    ours = ChatTemplate("{{ messages[0].content is none }}{{ messages[0]['content'] }}{{ messages[0].name is none }}")
    assert ours.render(talk, {}) == "TrueFalse"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% include 'other' %}", "line 1 of the chat template names another template"),
        ("\n{% import 'other' as o %}", "line 2 of the chat template names another"),
        ("{% extends 'other' %}", "names another"),
        ("{% for", "not a Jinja template"),
        ("{{ x | no_such_filter }}", "not a Jinja template: No filter named 'no_such_filter'"),
        ("{% generation %}", "not a Jinja template"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "not a Jinja template"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "not a Jinja template"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on the conversation: OverflowError: Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "its loops do not end"),
        ("{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(5) }}", "its loops do not end|RecursionError"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", "loops do not end"),
        ("{{ 10 ** 999999 }}", "a power above 100"),
        ("{{ ('a' * 10 ** 10) | length }}", "it makes a text or list of 10000000000 entries"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "or list"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "or list"),
        ("{% set x = 'ab' * 10000000 %}{% for i in range(60) %}{{ x }}{% endfor %}", "text or list of"),
        ("{{ 1 / 0 }}", "fails on the conversation: ZeroDivisionError"),
        ("{{ messages[0].role + 1 }}", "fails on the conversation: TypeError"),
        ("{{ messages.append(1) }}", "rejects the conversation"),
        ("{{ messages[0]['content'] }}", 'writes "content" as it is, and that of a turn is a list of parts'),
        ("{{ 'x' ~ messages[2].content }}", "of a turn is an object; put one text"),
        ("{{ 'x' + messages[1].content }}", "has no attribute 'content', and a turn has none, or null; give it a text"),
    ],
)  # fmt: skip
def test_a_template_that_goes_wrong_is_one_sentence(template, says, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 20_000)
    with pytest.raises(UserError, match=says):
        ChatTemplate(template).render(TALK, {})


def test_a_rendering_has_a_limit_of_time(monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.05)
    begin = time.monotonic()
    with pytest.raises(UserError, match="its loops do not end"):
        ChatTemplate("{% for i in range(9999) %}{{ range(9999) | sort | length }}{% endfor %}").render(TALK, {})
    assert time.monotonic() - begin < 30


def test_the_limits_are_far_from_long_conversations():
    turns = [{"role": "user", "content": json.dumps(n)} for n in range(300)]
    ours = ChatTemplate("{% for m in messages %}{% for o in messages %}{% endfor %}{{ m.content }}{% endfor %}")
    assert ours.render(turns, {}).endswith("298299")
