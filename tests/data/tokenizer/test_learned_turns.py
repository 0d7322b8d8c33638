"""megatron/data/tokenizer/learned_turns.py: the tokens that transformers marks for the same templates with
{% generation %}, found without the tag."""

import itertools

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.sft import SFTTokenizer
from tests.support.chat_templates import STYLES, WITH_CALLS, untagged, write_folder


def user(content):
    return {"role": "user", "content": content}


def bot(content, **more):
    return {"role": "assistant", "content": content, **more}


CALL = {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "utc"}'}}
TALKS = {
    "two answers": [{"role": "system", "content": "Be."}, user("the time?"), bot("12."), user("sure?"), bot("Yes")],
    "the same answer twice": [user("red?"), bot("Yes"), user("blue?"), bot("Yes")],
    "an answer as in the text around it": [user("assistant"), bot("assistant"), user("\n"), bot("\n")],
    "blanks": [user(" q "), bot("  spaced  "), user("q"), bot("\n\nlines\n\n")],
    "an empty answer": [user("q"), bot(""), user("q"), bot("")],
    "other letters": [user("naïve 你好"), bot("你好 🙂"), user("?"), bot("é")],
    "spelled like a prompt": [user("q"), bot("<"), user("<think>"), bot("<|"), user("q"), bot("<thin")],
    "an end mark in the answer": [user("q"), bot("a</s>b"), user("</s>"), bot("<|im_end|>")],
    "two in a row": [user("q"), bot("one"), bot("two"), user("q"), bot("three")],
    "ends with a question": [user("q"), bot("a"), user("q")],
    "begins with the assistant": [bot("Hello"), user("q"), bot("Hello")],
    "thoughts in the text": [user("q"), bot("<think>\nplan\n</think>\n\nRed")] * 2,
    "thoughts beside the text": [user("q"), bot("Red", reasoning="plan"), user("q"), bot("Blue", thinking="x")],
    "calls": [
        user("q"),
        bot(None, tool_calls=[CALL]),
        {"role": "tool", "content": "12"},
        bot("12."),
        user("q"),
        bot("a"),
    ],
}


def marked_by_transformers(folder, messages, **fields):
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, **fields
    )
    return made["input_ids"], [bool(learned) for learned in made["assistant_masks"]]


def shown(tokenizer, encoded):
    """The text, with brackets around what is learned."""
    parts = itertools.groupby(zip(*encoded, strict=True), lambda pair: bool(pair[1]))
    return "".join(
        "⟦" * learned + tokenizer.detokenize([i for i, _ in part]) + "⟧" * learned for learned, part in parts
    )


@pytest.mark.parametrize("style", STYLES)
def test_what_is_learned_in_the_styles_of_models(style, tmp_path):
    tagged = write_folder(tmp_path / "tagged", STYLES[style])
    plain = SFTTokenizer(write_folder(tmp_path / "plain", untagged(STYLES[style])))
    of_tags = SFTTokenizer(tagged)
    for talk, messages in TALKS.items():
        if talk == "calls" and style not in WITH_CALLS:
            continue
        want = marked_by_transformers(tagged, messages)
        assert any(want[1]), talk
        for ours in (of_tags, plain):
            got = ours.encode_conversation(messages)
            assert (talk, shown(ours, got)) == (talk, shown(ours, want))
            of_calls = ours.detokenize([index for index, kind in zip(*got, strict=True) if kind == 2])
            assert ("clock" in of_calls) == (talk == "calls") and "12." not in of_calls
            assert (got[0], list(map(bool, got[1]))) == want


@pytest.mark.parametrize("style", WITH_CALLS)
def test_fields_of_a_row_reach_the_template(style, tmp_path):
    tagged = write_folder(tmp_path / "tagged", STYLES[style])
    plain = SFTTokenizer(write_folder(tmp_path / "plain", untagged(STYLES[style])))
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"zone": {"type": "string"}}}}]
    fields = {"tools": tools, "documents": None, "today": "2026-01-02"}
    for messages in (TALKS["two answers"], TALKS["calls"]):
        want = marked_by_transformers(tagged, messages, **fields)
        got = plain.encode_conversation(messages, fields)
        assert shown(plain, got) == shown(plain, want)
    source = STYLES[style]
    unread = {name for name in fields if name not in source} | {"id"}
    assert plain.unread_fields([user("q") | {"weight": 1}], {**fields, "id": 7}) == unread | {"weight"}
    thoughts = {"reasoning"} if style in ("DeepSeek", "Mistral") else set()
    assert plain.unread_fields([bot("a", reasoning="b")], {}) == thoughts


def test_thoughts_that_are_switched_off_are_part_of_the_prompt(tmp_path):
    ours = SFTTokenizer(write_folder(tmp_path / "hf", untagged(STYLES["Qwen 3"])))
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    assert shown(ours, ours.encode_conversation(TALKS["the same answer twice"], fields)) == (
        "<|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n"
        "<|im_start|>user\nblue?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Yes<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        # an end mark that the next turn writes, and a prompt in the user's turn
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ '' if loop.first else eos_token }}USER: "
            "{{ m.content }} ASSISTANT:{% else %} {{ m.content }}{% endif %}{% endfor %}{{ eos_token }}",
            "USER: red? ASSISTANT:⟦ Yes</s>⟧USER: blue? ASSISTANT:⟦ Yes</s>⟧",
        ),
        # the text of all turns in one variable
        (
            "{% set ns = namespace(text='') %}{% for m in messages %}"
            "{% set ns.text = ns.text + '[' + m.role + ']' + m.content + eos_token %}{% endfor %}{{ ns.text }}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            "[user]red?</s>[assistant]⟦Yes</s>⟧[user]blue?</s>[assistant]⟦Yes</s>⟧",
        ),
        # the same without a prompt
        (
            "{% set ns = namespace(text='') %}{% for m in messages %}"
            "{% set ns.text = ns.text ~ '[' ~ m.role ~ ']' ~ m.content ~ eos_token %}{% endfor %}{{ ns.text }}",
            "[user]red?</s>[assistant]⟦Yes</s>⟧[user]blue?</s>[assistant]⟦Yes</s>⟧",
        ),
        # a prompt that is always there
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}[assistant]",
            "[user]red?|[assistant]⟦Yes|⟧[user]blue?|[assistant]⟦Yes|⟧[assistant]",
        ),
        # pairs
        (
            "{% for i in range(0, messages | length, 2) %}Q: {{ messages[i].content }} A: "
            "{{ messages[i + 1].content }}{{ eos_token if messages[i + 1] }}{% endfor %}",
            "Q: red? A:⟦ Yes</s>⟧Q: blue? A:⟦ Yes</s>⟧",
        ),
        # a macro, a block and a loop that looks at all messages
        (
            "{% macro one(m) %}[{{ m.role }}]{{ m.content | upper }}{% endmacro %}{% set all %}{% for m in messages %}"
            "{% for other in messages %}{% if other is sameas m %}{% set n = 1 %}{% endif %}{% endfor %}"
            "{{ one(m) }}{{ eos_token }}{% endfor %}{% endset %}{{ all }}",
            "[user]RED?</s>[assistant]⟦YES</s>⟧[user]BLUE?</s>[assistant]⟦YES</s>⟧",
        ),
        # the place in the conversation is part of the header
        (
            "{% for m in messages %}{{ loop.revindex }}{{ m.content }};{% endfor %}",
            "4red?;3⟦Yes;⟧2blue?;1⟦Yes;⟧",
        ),
        # without the last turn
        (
            "{% for m in messages[:-1] %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
            "user:red?\nassistant:⟦Yes\n⟧user:blue?\n",
        ),
        # JSON
        (
            "{% for m in messages %}{{ m.role }}: {{ m | tojson }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            'user: {"role": "user", "content": "red?"}\nassistant: ⟦{"role": "assistant", "content": "Yes"}\n⟧'
            'user: {"role": "user", "content": "blue?"}\nassistant: ⟦{"role": "assistant", "content": "Yes"}\n⟧',
        ),
    ],
)  # fmt: skip
def test_what_is_learned_in_unusual_templates(template, text, tmp_path):
    ours = SFTTokenizer(write_folder(tmp_path / "hf", template))
    assert shown(ours, ours.encode_conversation(TALKS["the same answer twice"])) == text


@pytest.mark.parametrize(
    "template",
    [
        # all turns in one variable, whose earlier ones change
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ loop.revindex ~ m.content %}{% endfor %}{{ ns.text }}",
        # a block that edits what the loop has written
        "{% filter trim %}{% for m in messages %} {{ m.content }} {% endfor %}{% endfilter %}",
    ],
)
def test_turns_that_cannot_be_told_apart_are_refused_with_the_way_out(template, tmp_path):
    ours = SFTTokenizer(write_folder(tmp_path / "hf", template))
    with pytest.raises(UserError, match=r"cannot tell .*{% generation %}"):
        ours.encode_conversation(TALKS["the same answer twice"])
