"""The tokenizer of converted models: its files, its ids in config.json, and the flags of an import."""

import json
from pathlib import Path

import pytest
from conversion.saved_models import LLAMA, save_checkpoint
from conversion.test_against_transformers import quiet
from conversion.test_importing import TOKENIZER
from support.huggingface_folders import byte_level_json, write_folder
from tokenizers import AddedToken

from megatron.conversion.exporting import export_model
from megatron.conversion.importing import import_model
from megatron.conversion.tokenizer_files import (
    copy_tokenizer,
    end_ids,
    listed_ends,
    special_ids,
    tokenizer_flags,
    writer_of_tokenizer,
)
from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.training.trained_model import config_for_one_process, load_trained_model
from pretrain_gpt import build_model

BPE = TOKENIZER.parent / "gpt2bpe"
T5 = "--num-attention-heads 1 --max-position-embeddings 8 --tokenizer-type BertWordPieceLowerCase --vocab-file"
TEXT = "It's 1,234 déjà-vu words.\n\n  ok"


def test_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    folder, target = tmp_path / "from", tmp_path / "copy"
    folder.mkdir()
    (folder / "generation_config.json").write_text("{}")
    assert copy_tokenizer(folder, target) == [] and not target.exists()
    (folder / "generation_config.json").write_text('{"top_p": 0.8}')
    (folder / "tokenizer.json").write_text("{}")
    assert copy_tokenizer(folder, target) == ["tokenizer.json", "generation_config.json"]
    assert sorted(path.name for path in target.iterdir()) == ["generation_config.json", "tokenizer.json"]


def test_all_ids_that_end_a_text_travel(tmp_path: Path) -> None:
    """A chat model ends a text at several ids, which are in generation_config.json or in config.json alone."""
    flags = f"{LLAMA} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER}"
    own = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(TOKENIZER)))
    ends = [own.eod, 3, 5]
    root = save_checkpoint(flags, tmp_path / "run", vocab_size=own.vocab_size)
    export_model(root, tmp_path / "theirs", build_model, log=quiet)
    for place in ("generation_config.json", "config.json"):
        config = json.loads((tmp_path / "theirs" / "config.json").read_text())
        for file in ("generation_config.json", "config.json"):
            content = config if file == "config.json" else {}
            (tmp_path / "theirs" / file).write_text(
                json.dumps(content | {"eos_token_id": ends if file == place else None})
            )
        ours, again = tmp_path / f"ours-{place}", tmp_path / f"again-{place}"
        import_model(tmp_path / "theirs", ours, build_model, log=quiet)
        trained = load_trained_model(build_model, ours, log=quiet)
        assert end_ids(trained.config.tokenizer, trained.tokenizer) == ends
        export_model(ours, again, build_model, log=quiet)
        assert json.loads((again / "config.json").read_text())["eos_token_id"] == ends
        transformers = pytest.importorskip("transformers")
        assert transformers.GenerationConfig.from_pretrained(again).eos_token_id == ends


@pytest.mark.parametrize("tokenizer", ["none", "too large", "of a slow class"])
def test_what_is_about_text_travels_with_a_null_tokenizer(tmp_path: Path, tokenizer: str) -> None:
    """A folder whose tokenizer cannot be used here comes back with it, with its ids and its settings of generation."""
    root = save_checkpoint(LLAMA, tmp_path / "run")
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    export_model(root, theirs, build_model, log=quiet)
    files: dict[str, bytes] = {}
    if tokenizer == "too large":
        files = {"tokenizer.json": (TOKENIZER / "tokenizer.json").read_bytes(), "chat_template.jinja": b"{{ 1 }}"}
    elif tokenizer == "of a slow class":
        files = {"tokenizer.model": b"pieces", "tokenizer_config.json": b'{"tokenizer_class": "OwnTokenizer"}'}
    for name, content in files.items():
        (theirs / name).write_bytes(content)
    settings = {"eos_token_id": [3, 5], "temperature": 0.7}
    (theirs / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((theirs / "config.json").read_text()) | {"pad_token_id": 7, "bos_token_id": 1}
    (theirs / "config.json").write_text(json.dumps(config))

    flags = import_model(theirs, ours, build_model, log=quiet).flags
    assert flags[-6:] == [
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "39"),
        *("--tokenizer-model", str(ours / "tokenizer")),
    ]
    trained = load_trained_model(build_model, ours, log=quiet)
    assert end_ids(trained.config.tokenizer, trained.tokenizer) == [3, 5]
    said: list[str] = []
    export_model(ours, back, build_model, log=said.append)
    exported = json.loads((back / "config.json").read_text())
    assert [exported[f"{key}_token_id"] for key in ("eos", "pad", "bos")] == [[3, 5], 7, 1]
    known = settings | {"pad_token_id": 7, "bos_token_id": 1}
    assert json.loads((back / "generation_config.json").read_text()) == known
    assert {name: (back / name).read_bytes() for name in files} == files
    assert not any("tokenizer" in line for line in said)


@pytest.mark.parametrize("ends", ["<|eot|>", [1, "2"], {"id": 3}, -1, 2.5, True])
def test_ends_that_are_no_ids_are_refused(tmp_path: Path, ends: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is .* must be a token id or a list"):
        listed_ends(tmp_path)


def test_a_gpt2_tokenizer_goes_to_transformers_and_back(tmp_path: Path) -> None:
    """The default tokenizer. transformers would otherwise begin and end texts with ids of the published Llama."""
    files = f"--vocab-file {BPE / 'vocab.json'} --merge-file {BPE / 'merges.txt'}"
    ours = GPT2BPETokenizer(str(BPE / "vocab.json"), str(BPE / "merges.txt"))
    flags = f"{LLAMA} --tokenizer-type GPT2BPETokenizer {files} --vocab-size {ours.vocab_size}"
    root = save_checkpoint(flags, tmp_path / "run", vocab_size=ours.vocab_size)
    export_model(root, tmp_path / "theirs", build_model, log=quiet)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == ours.eod

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs(TEXT).input_ids == ours.tokenize(TEXT) and theirs.eos_token_id == ours.eod

    done = import_model(tmp_path / "theirs", tmp_path / "again", build_model, log=quiet)
    again = tmp_path / "again" / "tokenizer"
    words = ["GPT2BPETokenizer", "--vocab-file", str(again / "vocab.json"), "--merge-file", str(again / "merges.txt")]
    assert done.flags[-5:] == words and (again / "merges.txt").is_file()


@pytest.mark.parametrize("kind", ["LowerCase", "Case"])
def test_a_bert_tokenizer_goes_to_transformers_and_back(tmp_path: Path, kind: str) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [prefix + letter for letter in "abcdefghijklmnopqrstuvwxyzIéà0123456789',.-" for prefix in ("", "##")]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*special, *letters, "word", "##ds", "it"]) + "\n")
    flags = TokenizerConfig(tokenizer_type=f"BertWordPiece{kind}", vocab_file=str(vocab), vocab_extra_ids=2)
    ours, folder = build_tokenizer(flags), tmp_path / "theirs"
    folder.mkdir()
    writer_of_tokenizer(flags, None, quiet)(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs(TEXT, add_special_tokens=False).input_ids
    assert ids == ours.tokenize(TEXT) and ours.vocab["[UNK]"] not in ids
    assert ids != build_tokenizer(
        TokenizerConfig(tokenizer_type=f"BertWordPiece{other(kind)}", vocab_file=str(vocab))
    ).tokenize(TEXT)
    assert theirs(TEXT).input_ids == [ours.cls, *ids, ours.sep] and theirs.get_vocab() == ours.vocab

    place = tmp_path / "again"
    words = tokenizer_flags(folder, len(ours.vocab) + 3, place, quiet)
    assert copy_tokenizer(folder, place) == ["tokenizer_config.json", "vocab.txt"]
    assert words[:4] == ["--tokenizer-type", f"BertWordPiece{kind}", "--vocab-file", str(place / "vocab.txt")]
    again = build_tokenizer(TokenizerConfig(tokenizer_type=words[1], vocab_file=words[3]))
    assert again.vocab == ours.vocab and words[4:] == ["--vocab-size", str(len(ours.vocab) + 3)]


@pytest.mark.parametrize(
    ("settings", "lines", "reason"),
    [
        ({}, ["[PAD]", "a", "a"], "vocab.txt:3: 'a' is also in line 2"),
        ({"strip_accents": False}, ["[PAD]"], "strip_accents is False, and ours has True only"),
        ({"tokenize_chinese_chars": False}, ["[PAD]"], "tokenize_chinese_chars is False, and ours has True only"),
    ],
)
def test_word_pieces_that_ours_cannot_be(
    tmp_path: Path, settings: dict[str, bool], lines: list[str], reason: str
) -> None:
    """The model is imported nevertheless."""
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    said: list[str] = []
    assert tokenizer_flags(tmp_path, 1000, tmp_path, said.append)[1] == "NullTokenizer"
    assert len(said) == 1 and reason in said[0]


def other(kind: str) -> str:
    return "Case" if kind == "LowerCase" else "LowerCase"


def test_files_of_another_slow_tokenizer_are_not_read_as_gpt2s(tmp_path: Path) -> None:
    """Its class cuts other words than GPT-2's, although the files have the same names."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((BPE / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert tokenizer_flags(tmp_path, 1000, tmp_path, quiet)[1] == "NullTokenizer"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    root = save_checkpoint(LLAMA, tmp_path / "run")
    with pytest.raises(UserError, match=f"--tokenizer-model {tmp_path / 'typo'}: no folder with the files"):
        export_model(root, tmp_path / "theirs", build_model, tokenizer=tmp_path / "typo", log=quiet)
    assert not (tmp_path / "theirs").exists()


def test_unknown_ids_are_null(tmp_path: Path) -> None:
    """An absent key would be 1 and 2 for a Llama, at which a generated text would end."""
    root = save_checkpoint(LLAMA, tmp_path / "run")
    export_model(root, tmp_path / "theirs", build_model, log=quiet)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["bos_token_id"] is None and config["eos_token_id"] is None


def test_an_export_without_the_files_of_the_tokenizer_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    flags = "--tokenizer-type GPT2BPETokenizer --vocab-file gone.json --merge-file gone.txt"
    root = save_checkpoint(f"{LLAMA} {flags}", tmp_path / "run")
    export_model(root, tmp_path / "theirs", build_model, log=said.append)
    assert "config.json names no tokens that begin and end a text: --vocab-file gone.json" in said[0]
    assert said[1].startswith("the files of the run's GPT2BPETokenizer are gone")


def test_a_t5_names_the_token_that_begins_the_decoders_text(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    words = f"--micro-batch-size 1 --seq-length 8 --decoder-seq-length 8 --num-layers 1 --hidden-size 8 {T5} {vocab}"
    config = config_for_one_process({"command_line": words.split(), "model_family": "t5"}, [], has_cuda=False)
    ids = special_ids(config, None, 8, quiet)
    assert ids == {"bos_token_id": 6, "eos_token_id": 7, "pad_token_id": 0, "decoder_start_token_id": 6}
    assert special_ids(config, None, 7, quiet)["eos_token_id"] is None  # beyond the rows of the model


@pytest.mark.parametrize("keeps_blanks", [True, False])
def test_a_folder_of_sentencepiece_alone(tmp_path: Path, keeps_blanks: bool) -> None:
    """The first Llamas have it. A model that joins blanks is not used: transformers always keeps them."""
    transformers, sentencepiece = (pytest.importorskip(name) for name in ("transformers", "sentencepiece"))
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    root = save_checkpoint(f"{LLAMA} --vocab-size 399", tmp_path / "run", vocab_size=400)
    export_model(root, theirs, build_model, log=quiet)
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": not keeps_blanks}
    options |= {"vocab_size": 390, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    with (theirs / "tokenizer.model").open("wb") as file:
        lines = iter(["the words and  more words", "lorem ipsum dolor", "déjà vu: 1,234\tok"] * 40)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=file, hard_vocab_limit=False, **options
        )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (theirs / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **roles}))
    flags = import_model(theirs, ours, build_model, log=quiet).flags
    trained = load_trained_model(build_model, ours, log=quiet)
    export_model(ours, back, build_model, log=quiet)
    after = transformers.AutoTokenizer.from_pretrained(back)
    text = "the  words\nof déjà  ☃"  # transformers puts no blank before a text that begins with one
    ids = after(text, add_special_tokens=False).input_ids
    if keeps_blanks:
        assert trained.tokenizer.tokenize(text) == ids and len(ids) > 5
        assert trained.tokenizer.eod == after.eos_token_id == 2
        assert json.loads((back / "config.json").read_text())["eos_token_id"] == 2
    assert ("NullTokenizer" in flags) != keeps_blanks and ("Llama2Tokenizer" in flags) == keeps_blanks


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]


def test_everything_about_text_travels(tmp_path: Path) -> None:
    """Settings of generation, chat template, ends, added tokens and padding of a folder, there and back."""
    transformers = pytest.importorskip("transformers")
    made = byte_level_json(added=[AddedToken("<own>", normalized=False)])
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<pad>")])
    vocab = made.get_vocab()
    end, pad, bos = vocab["<|im_end|>"], vocab["<pad>"], vocab["<own>"]
    flags = f"{LLAMA} --tokenizer-type NullTokenizer --vocab-size {len(vocab) - 1}"
    root = save_checkpoint(flags, tmp_path / "run", vocab_size=len(vocab))
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    export_model(root, theirs, build_model, log=quiet)
    write_folder(theirs, made, pad_token="<pad>", model_max_length=77)
    (theirs / "chat_template.jinja").write_text(TEMPLATE)
    (theirs / "additional_chat_templates").mkdir()
    (theirs / "additional_chat_templates/brief.jinja").write_text(OTHER)
    ends = [end, vocab["<|endoftext|>"]]
    settings = {"eos_token_id": ends, "temperature": 0.7, "top_p": 0.8, "do_sample": True}
    (theirs / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((theirs / "config.json").read_text()) | {"pad_token_id": pad, "bos_token_id": bos}
    (theirs / "config.json").write_text(json.dumps(config))

    import_model(theirs, tmp_path / "ours", build_model, log=quiet)
    export_model(tmp_path / "ours", back, build_model, log=quiet)
    known = settings | {"pad_token_id": pad, "bos_token_id": bos}
    assert json.loads((back / "generation_config.json").read_text()) == known
    exported = json.loads((back / "config.json").read_text())
    assert (exported["pad_token_id"], exported["bos_token_id"]) == (pad, bos)
    assert sorted(exported["eos_token_id"]) == sorted(ends)
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (theirs, back))
    assert after.get_vocab() == before.get_vocab() == vocab and after.pad_token_id == pad
    assert after.model_max_length == 77 and after("a<own>b").input_ids == before("a<own>b").input_ids
    shown = before.apply_chat_template(CHAT, tokenize=False)
    assert after.chat_template == before.chat_template == {"default": TEMPLATE, "brief": OTHER}
    assert "<|im_start|>user\nHello" in shown and after.apply_chat_template(CHAT, tokenize=False) == shown

    (tmp_path / "other.jinja").write_text(OTHER)
    tuning = TokenizerConfig(
        tokenizer_type="SFTTokenizer", tokenizer_model=str(back), chat_template=str(tmp_path / "other.jinja")
    )
    (tmp_path / "tuned").mkdir()
    writer_of_tokenizer(tuning, None, quiet)(tmp_path / "tuned")
    (tmp_path / "tuned/config.json").write_text((back / "config.json").read_text())
    tuned = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert tuned.apply_chat_template(CHAT, tokenize=False) == "[user] Hello<|endoftext|>[assistant] Yes<|endoftext|>"
