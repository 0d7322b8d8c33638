"""megatron/data/preparation/inspection.py and tools/inspect_data.py: each fault is found and named."""

import importlib
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.inspection import find_faults
from megatron.data.preparation.prepare import prepare
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.data.tokenizer.null import NullTokenizer

TOOLS = str(Path(__file__).parents[3] / "tools")


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"{n} 7 8"}) + "\n" for n in range(20)))
    config = PreparationConfig(
        input=[str(tmp_path / "in.jsonl")], output_prefix=str(tmp_path / "x"), workers=1, append_eod=True
    )
    prepare(config, NullTokenizer(50), Console(file=io.StringIO()), lambda _: None)
    return str(tmp_path / "x_text_document")


def test_a_whole_data_set_has_no_fault(prefix):
    assert list(find_faults(prefix)) == list(find_faults(prefix, NullTokenizer(50))) == []


def edit(path, change):
    content = bytearray(Path(path).read_bytes())
    change(content)
    Path(path).write_bytes(content)


FAULTS = {
    "cut .bin": (".bin", lambda c: c.__delitem__(slice(-2, None)), r"x_text_document.bin: 158 bytes, .*idx says 160"),
    "cut .idx": (".idx", lambda c: c.__delitem__(slice(-8, None)), r"x_text_document.idx: too short"),
    "flipped byte": (".bin", lambda c: c.__setitem__(2, 9), r"x_text_document.bin: not the file .*content differs"),
    "large id": (".bin", lambda c: c.__setitem__(9, 1), r"id 257 at document 1, offset 0, but the model"),
    "wrong length": (".idx", lambda c: c.__setitem__(34, 9), r"x_text_document.(bin|idx): "),
    "other counts": (".manifest.json", lambda c: c.__setitem__(slice(None), c.replace(b'ens": 80', b'ens": 81')),
                     r"x_text_document.idx: tokens 80, but .*manifest.json says 81"),
    "broken manifest": (".manifest.json", lambda c: c.__setitem__(0, 33), r"manifest.json: not a manifest"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(prefix, fault):
    suffix, change, says = FAULTS[fault]
    edit(f"{prefix}{suffix}", change)
    found = "\n".join(find_faults(prefix))
    assert re.search(says, found), found


def test_another_tokenizer_is_named(prefix):
    golden = Path(__file__).parents[2] / "data/golden/corpus/gpt2bpe"
    bpe = GPT2BPETokenizer(str(golden / "vocab.json"), str(golden / "merges.txt"))
    (fault,) = find_faults(prefix, bpe)
    assert "made with a NullTokenizer of 51 ids" in fault and "the run has a GPT2BPETokenizer of 600 ids" in fault


def test_without_a_manifest_ids_are_checked(prefix):
    Path(f"{prefix}.manifest.json").unlink()
    assert list(find_faults(prefix)) == []
    (fault,) = find_faults(prefix, NullTokenizer(9))
    assert "id 50 at document 0, offset 3" in fault


def test_the_tool_shows_documents_and_faults(prefix, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    tool = importlib.import_module("inspect_data")
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
    words = ["--data-path", prefix, "--documents", "2", "--first-document", "3", "--tokens", "3", *tokenizer]
    assert tool.main(words) == 0
    shown = capsys.readouterr().out
    assert "20 documents, 20 sequences, 80 tokens (uint16); no fault found" in shown
    assert "--- document 3: 1 sequences, 4 tokens, the first 3\n3 7 8\n--- document 4" in shown
    edit(f"{prefix}.bin", lambda content: content.__setitem__(0, 200))
    assert tool.main(["--data-path", prefix]) == 1
    assert capsys.readouterr().out.startswith(f"FAULT: {prefix}.bin: not the file")
    assert tool.main(["--documents", "1"]) == 2
    assert "--data-path: missing" in capsys.readouterr().err
    assert tool.main(["--data-path", prefix, "--documents", "1"]) == 2


def test_what_is_learned_of_a_conversation_is_marked(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    tool = importlib.import_module("inspect_data")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk)}\n{{}}\n")
    golden = Path(__file__).parents[2] / "data/golden/corpus/hf"
    words = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(golden)]
    words += ["--chat-template", str(tmp_path / "chat.jinja"), "--documents", "2", "--data-path"]
    assert tool.main([*words, str(tmp_path / "talks.jsonl")]) == 1
    shown = capsys.readouterr().out
    assert "[user] Hi<|endoftext|>[assistant]« Hello<|endoftext|>»\n" in shown
    assert f"FAULT: {tmp_path}/talks.jsonl:2: expected " in shown and "1 conversations, " in shown
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert tool.main([*words, str(tmp_path / "talks.jsonl")]) == 1
    assert "\x1b[1;32m" in capsys.readouterr().out
    assert tool.main([*words, str(tmp_path / "talks.jsonl"), "--first-document", "2"]) == 2
    assert "--first-document 2: " in capsys.readouterr().err
    (tmp_path / "talks.jsonl").write_text("")
    assert tool.main([*words, str(tmp_path / "talks.jsonl")]) == 2
    assert "contains no conversations" in capsys.readouterr().err


def test_an_empty_path_is_refused(monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    assert importlib.import_module("inspect_data").main(["--data-path", ""]) == 2
    assert '--data-path "" is an empty path' in capsys.readouterr().err
