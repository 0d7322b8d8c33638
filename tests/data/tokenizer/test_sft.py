"""megatron/data/tokenizer/sft.py: conversations as transformers renders them; which tokens are the assistant's."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.sft import SFTTokenizer

GOLDEN = Path(__file__).parents[2] / "data/golden/corpus/hf"
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "the time?"},
    {"role": "assistant", "content": "It is 12, or so."},
    {"role": "user", "content": "naïve 你好"},
    {"role": "assistant", "content": "Was?"},
]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tokenizer"
    shutil.copytree(GOLDEN, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    return path


def learned_text(tokenizer, messages):
    ids, learned = tokenizer.encode_conversation(messages)
    assert len(ids) == len(learned)
    return tokenizer.detokenize([index for index, learns in zip(ids, learned, strict=True) if learns])


def test_ids_of_transformers_and_the_assistants_turns(folder):
    from transformers import AutoTokenizer

    ours = SFTTokenizer(str(folder))
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert ours.encode_conversation(TALK)[0] == list(theirs)
    assert learned_text(ours, TALK) == "It is 12, or so.<|im_end|>\nWas?<|im_end|>\n"
    assert pickle.loads(pickle.dumps(ours)).encode_conversation(TALK) == ours.encode_conversation(TALK)
    assert ours.tokenize("the time") == SFTTokenizer(str(folder), "identity").tokenize("the time")


@pytest.mark.parametrize(
    ("prompt_format", "text", "learned"),
    [
        (
            "nemotron-h-aligned",
            "<SPECIAL_10>System\nS\n<SPECIAL_11>User\nU1\n<SPECIAL_11>Assistant\nA1\n"
            "<SPECIAL_11>User\nU2\n<SPECIAL_11>Assistant\nA2\nx\n",
            "A1\nA2\nx\n",
        ),
        (
            "nemotron-nano-v2",
            "<SPECIAL_10>System\nS\n<SPECIAL_11>User\nU1\n<SPECIAL_11>Assistant\nA1\n<SPECIAL_12>\n"
            "<SPECIAL_11>User\nU2\n<SPECIAL_11>Assistant\nA2\nx\n<SPECIAL_12>\n",
            "A1\n<SPECIAL_12>\nA2\nx\n<SPECIAL_12>\n",
        ),
    ],
)
def test_prompt_formats_of_nemotron_are_megatron_lms(prompt_format, text, learned):
    """The texts are those that Megatron-LM 0.19.2 made. Each of Nemotron's marks is one token, so that it learns
    neither the marks nor the word Assistant."""
    tokenizer = SFTTokenizer(str(GOLDEN), prompt_format)
    users = [{"role": "user", "content": f"U{number}"} for number in (1, 2)]
    talk = [{"role": "system", "content": " S \n"}, users[0], {"role": "assistant", "content": " A1 \n"}, users[1]]
    whole = [*talk, {"role": "assistant", "content": "A2\nx"}]
    assert tokenizer.detokenize(tokenizer.encode_conversation(whole)[0]) == text
    assert learned_text(tokenizer, whole) == learned
    asked = tokenizer.detokenize(tokenizer.encode_prompt(talk))
    assert text.startswith(asked) and asked.endswith("U2\n<SPECIAL_11>Assistant\n")
    for turn in ({"role": "tool", "content": "3"}, {"role": "assistant", "content": " "}):
        with pytest.raises(UserError, match=f"no empty turn of the assistant, and no role {turn['role']}"):
            tokenizer.encode_conversation([*talk, turn])


def test_templates_of_other_places(folder, tmp_path):
    identity = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SFTTokenizer", tokenizer_model=str(folder), sft_tokenizer_prompt_format="identity"
        )
    )
    assert learned_text(identity, TALK) == "It is 12, or so.Was?"
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{{ eos_token }}{% endfor %}")
    own = SFTTokenizer(str(folder), chat_template=str(file))
    assert learned_text(own, TALK[:3]) == 'It is 12, or so."<|endoftext|>'
    (folder / "chat_template.jinja").write_text(file.read_text())
    assert SFTTokenizer(str(folder)).digest == own.digest != identity.digest


def test_a_template_for_tools_and_names_of_templates(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    with_tools = "{{ tools | length }}" + CHATML
    for templates in (
        [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": CHATML}],
        {"tool_use": with_tools, "default": CHATML, "other": "{{ x }}"},
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
        ours = SFTTokenizer(str(folder))
        plain, tools = (ours.detokenize(ours.encode_conversation(TALK, f)[0]) for f in ({}, {"tools": [{}, {}]}))
        assert tools == "2" + plain
        assert ours.unread_fields(TALK, {"tools": [], "chat_template_kwargs": {"x": 1}}) == {"x"}
        assert ours.unread_fields(TALK, {"chat_template_kwargs": None}) == set()
    for wrong in (5, [{"name": "default"}], ["a"], {"default": 5}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": wrong}))
        with pytest.raises(UserError, match=r"chat_template is not a text, or a list|has no chat template"):
            SFTTokenizer(str(folder))


def test_templates_of_transformers_know_only_tokens_that_exist(folder, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(
        "{{ eos_token }}{{ cls_token is defined }}{{ image_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"image_token": "<image>"}))
    ours = SFTTokenizer(str(folder), chat_template=str(file))
    assert ours.detokenize(ours.encode_conversation(TALK)[0]).startswith("<|endoftext|>False<image>Be kind.")


def test_the_date_of_today_is_told(folder, tmp_path, caplog):
    file = tmp_path / "own.jinja"
    file.write_text("{{ date_string or strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    ours = SFTTokenizer(str(folder), chat_template=str(file))
    ours.encode_conversation(TALK, {"date_string": "1 May"})
    assert "date" not in caplog.text
    ours.encode_conversation(TALK)
    assert "writes the date of today" in caplog.text and "a field date_string in each line" in caplog.text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": "[]"}, '"tools" is not a list of objects'),
        ({"documents": ["a"]}, '"documents" is not a list of objects'),
        ({"chat_template_kwargs": {"tools": 1}}, '"tools" is not a list of objects'),
        ({"chat_template_kwargs": "x"}, '"chat_template_kwargs" is not an object'),
        ({"add_generation_prompt": True}, '"add_generation_prompt" is true'),
    ],
)
def test_fields_of_another_form(folder, fields, says):
    with pytest.raises(UserError, match=says):
        SFTTokenizer(str(folder)).encode_conversation(TALK, fields)


def test_mistakes(folder, tmp_path):
    ours = SFTTokenizer(str(folder))
    with pytest.raises(UserError, match="no turn to learn from: none of the 2 turns has the role assistant"):
        ours.encode_conversation(TALK[:2])
    silent = tmp_path / "silent.jinja"
    for template, says in {
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}": "writes nothing for turns of",
        "{% generation %}{% endgeneration %}{{ messages[0].content }}": "has nothing inside of {% generation %}",
    }.items():
        silent.write_text(template)
        with pytest.raises(UserError, match=f"no turn to learn from: the chat template {says}"):
            SFTTokenizer(str(folder), chat_template=str(silent)).encode_conversation(TALK)
    with pytest.raises(UserError, match=r"--chat-template n+: File name too long"):
        SFTTokenizer(str(folder), chat_template="n" * 300)
    with pytest.raises(UserError, match="has no chat template; give --chat-template FILE"):
        SFTTokenizer(str(GOLDEN))
    file = tmp_path / "own.jinja"
    for template, says in {
        "{{ raise_exception('turns must alternate') }}": "rejects the conversation: turns must alternate",
        "{% for": "is not a Jinja template",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}": "rejects the conversation: access to attribute",
    }.items():
        file.write_text(template)
        with pytest.raises(UserError, match=says):
            SFTTokenizer(str(folder), chat_template=str(file)).encode_conversation(TALK)
