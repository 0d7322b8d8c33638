"""Tokenizers in GGUF files: transformers builds one from the file, which gives the same ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conversion.oracles import make_model, save_model
from conversion.test_against_transformers import quiet
from conversion.test_importing import TOKENIZER
from tokenizers import Tokenizer, models, normalizers, trainers

from megatron.conversion.gguf import write_gguf
from megatron.conversion.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_tokenizer
from megatron.core.exceptions import UserError

gguf = pytest.importorskip("gguf")

TEXT = "Hello world, it's 12345 cats!\n\n  the quick é and the other"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def folder_with(tokenizer: Tokenizer | None, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def with_byte_fallback() -> Tokenizer:
    """A tokenizer like that of Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    lines = (TOKENIZER.parent / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([json.loads(line)["text"] for line in lines[:200]], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [added for added in state["added_tokens"] if not added["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback])
def test_transformers_reads_the_same_tokenizer(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    rows = tokenizer.get_vocab_size() + 2
    model = make_model("llama 2", torch.float32, vocab_size=rows, bos_token_id=0, eos_token_id=0)
    tokenizer.save(str(save_model(model, tmp_path / "hub") / "tokenizer.json"))
    write_gguf(tmp_path / "hub", tmp_path / "m.gguf", "f16", quiet)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf", add_bos_token=False)
    expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert loaded.encode(TEXT, add_special_tokens=False) == expected and len(expected) > 10
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert tokens == [tokenizer.id_to_token(number) or f"[PAD{number}]" for number in range(rows)]
    assert reader.get_field("tokenizer.ggml.token_type").contents()[-2:] == [UNUSED, UNUSED]


def test_types_roles_and_template(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["of my own"])
    size = tokenizer.get_vocab_size()
    folder = folder_with(tokenizer, tmp_path, {"bos_token_id": None, "eos_token_id": [0, 5], "pad_token_id": 3})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    found = read_tokenizer(folder, size, quiet)
    assert (found.model, found.pre, found.chat_template) == ("gpt2", "gpt-2", "{{ messages }}")
    assert [found.types[number] for number in (0, 1, size - 1)] == [CONTROL, NORMAL, USER_DEFINED]
    assert dict(found.ids) == {"eos_token_id": 0, "padding_token_id": 3}
    assert dict(found.switches) == {"add_bos_token": False, "add_eos_token": False}
    pieces = read_tokenizer(folder_with(with_byte_fallback(), tmp_path / "pieces", {"bos_token_id": 1}), 500, quiet)
    assert [pieces.types[number] for number in (0, 1, 3, 258, 300)] == [UNKNOWN, CONTROL, BYTE, BYTE, NORMAL]
    assert dict(pieces.switches)["add_space_prefix"] and dict(pieces.ids)["unknown_token_id"] == 0


def test_files_of_gpt2_are_read(tmp_path: Path) -> None:
    folder = folder_with(None, tmp_path, {"eos_token_id": 0})
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(TOKENIZER.parent / "gpt2bpe" / name, folder / name)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    vocab = json.loads((folder / "vocab.json").read_text())
    found = read_tokenizer(folder, len(vocab), quiet)
    assert list(found.tokens) == sorted(vocab, key=vocab.__getitem__) and found.pre == "gpt-2"
    assert found.types[vocab["<|endoftext|>"]] == CONTROL and not found.merges[0].startswith("#")


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}


def test_patterns_have_names_and_others_are_refused(tmp_path: Path) -> None:
    state = json.loads(byte_level().to_str())
    for pattern, name in ((LLAMA3, "llama-bpe"), (LLAMA3.replace("{1,3}", ""), "qwen2"), (r"\d", None)):
        (tmp_path / "tokenizer.json").write_text(json.dumps(state | {"pre_tokenizer": split_by(pattern)}))
        (tmp_path / "config.json").write_text("{}")
        if name is not None:
            assert read_tokenizer(tmp_path, 10**4, quiet).pre == name
            continue
        with pytest.raises(UserError, match=r"its pre_tokenizer is none of those .* GPT-2's, Llama 3's and Qwen2's"):
            read_tokenizer(tmp_path, 10**4, quiet)


def test_other_kinds_and_too_many_tokens_are_refused(tmp_path: Path) -> None:
    words = folder_with(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), tmp_path / "words", {})
    with pytest.raises(UserError, match="writes tokenizers of the type BPE, not WordLevel"):
        read_tokenizer(words, 9, quiet)
    with pytest.raises(UserError, match=r"tokenizer.json has the id \d+, but the model has 9 rows"):
        read_tokenizer(folder_with(byte_level(), tmp_path / "bytes", {}), 9, quiet)
    assert read_tokenizer(folder_with(None, tmp_path / "none", {}), 9, quiet).model == "none"
