"""tools/train_tokenizer.py: the same files each time; both families read them alike; mistakes are named."""

import gzip
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.tokenizer.bert_wordpiece import BertWordPieceTokenizer
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.data.tokenizer.sentencepiece import SentencePieceTokenizer

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests/data/golden/corpus/corpus.jsonl"
FILES = ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]


@pytest.fixture
def train(monkeypatch, capsys):
    """Runs the tool's main; returns exit code, stdout, stderr."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    main = importlib.import_module("train_tokenizer").main

    def run_main(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run_main


SIZES = {"GPT2BPETokenizer": 500, "BertWordPieceLowerCase": 450, "SentencePieceTokenizer": 450}


@pytest.fixture(scope="module")
def trained_elsewhere(tmp_path_factory) -> Path:
    """A folder with tokenizers of all kinds, trained in a new process, which has another hash seed."""
    folder = tmp_path_factory.mktemp("elsewhere")
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); from train_tokenizer import main"
    for kind, size in SIZES.items():
        words = ["--input", CORPUS, "--vocab-size", size, "--tokenizer-type", kind, "--output-dir", folder / kind]
        program += f"; assert main({list(map(str, words))}) == 0"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("500 tokens") == 1 and done.stdout.count("450 tokens") == 2
    return folder


@pytest.mark.slow
def test_files_are_the_same_each_time_and_alike(tmp_path, train, trained_elsewhere):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(CORPUS.read_bytes()))
    code, printed, _ = train("--input", packed, "--vocab-size", 500, "--output-dir", tmp_path / "0")
    assert code == 0 and "500 tokens" in printed
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / "0" / name).read_bytes() == (trained_elsewhere / "GPT2BPETokenizer" / name).read_bytes()
    gpt2 = GPT2BPETokenizer(str(tmp_path / "0/vocab.json"), str(tmp_path / "0/merges.txt"))
    hugging_face = HuggingFaceTokenizer(str(tmp_path / "0"))
    text = "Great came just time or while had 你好 \n\n 12"
    assert gpt2.tokenize(text) == hugging_face.tokenize(text) and len(gpt2.tokenize(text)) < 40
    assert gpt2.vocab_size == hugging_face.vocab_size == 500
    assert gpt2.eod == hugging_face.eod == 0 and hugging_face.speed_note is None


@pytest.mark.parametrize(
    ("kind", "file"), [("BertWordPieceLowerCase", "vocab.txt"), ("SentencePieceTokenizer", "tokenizer.model")]
)
def test_other_kinds_are_the_same_each_time(tmp_path, train, trained_elsewhere, kind, file):
    words = ["--input", CORPUS, "--vocab-size", SIZES[kind], "--tokenizer-type", kind]
    assert train(*words, "--output-dir", tmp_path / "0")[0] == 0
    assert [path.name for path in (tmp_path / "0").iterdir()] == [file]
    assert (tmp_path / "0" / file).read_bytes() == (trained_elsewhere / kind / file).read_bytes()


def test_words_become_few_pieces(tmp_path, train):
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Tokenizers {k} tokenize the Tokens.\n  End"}) + "\n" for k in range(50))
    )
    common = ("--input", path, "--output-dir", tmp_path, "--vocab-size")
    assert train(*common, 70, "--tokenizer-type", "BertWordPieceCase")[0] == 0
    cased = BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lower_case=False)
    assert [cased.inv_vocab[i] for i in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [cased.inv_vocab[i] for i in cased.tokenize("the tokenize End")] == ["the", "tokenize", "End"]
    assert len(cased.tokenize("tokenthe")) < len("tokenthe") and cased.tokenize("tokens?")[-1] == 1
    for kind in ("bpe", "unigram"):
        assert train(*common, 320, "--tokenizer-type", "SentencePieceTokenizer", "--model-type", kind)[0] == 0
        ours = SentencePieceTokenizer(str(tmp_path / "tokenizer.model"))
        assert (ours.bos, ours.eod, ours.pad) == (1, 2, 3) and len(ours.tokenize("tokenize the")) <= 6
        assert ours.detokenize(ours.tokenize("  Text 12\n 你")) == "  Text 12\n 你"


def test_transformers_reads_the_folder(tmp_path, train):
    from transformers import AutoTokenizer

    train("--input", CORPUS, "--vocab-size", 300, "--output-dir", tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), HuggingFaceTokenizer(str(tmp_path))
    assert theirs("  some text\n").input_ids == ours.tokenize("  some text\n") and theirs.eos_token_id == ours.eod


def test_a_part_of_the_input_is_taken_evenly(tmp_path, train):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefghij"[k // 100] * 40}) + "\n" for k in range(1000)))
    code, _, _ = train("--input", path, "--vocab-size", 267, "--max-bytes", 5000, "--output-dir", tmp_path)
    assert code == 0
    merges = (tmp_path / "merges.txt").read_text().split("\n")
    assert {"a a", "e e", "j j"} <= set(merges)  # first, middle and last of it


def test_a_small_text_gives_fewer_tokens(tmp_path, train):
    (tmp_path / "in.jsonl").write_text('{"text": "abab"}\n')
    code, _, errors = train("--input", tmp_path / "in.jsonl", "--output-dir", tmp_path / "out")
    assert code == 0
    assert errors == "warning: the text gives only 258 tokens, fewer than --vocab-size 32768\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["--input is required", "--output-dir is required"]),
        (["--input", "none", "--output-dir", "x"], ["--input none: no such file"]),
        (["--input", CORPUS, "--output-dir", "x", "--vocab-size", 100], ["--vocab-size 100 must be at least 257"]),
        (
            ["--input", CORPUS, "--output-dir", "x", "--vocab-size", 10**11],
            ["--vocab-size 100000000000 must be at most 10000000"],
        ),
        (
            ["--input", CORPUS, "--output-dir", "x", "--vocab-size", 4, "--tokenizer-type", "BertWordPieceCase"],
            ["--vocab-size 4 must be at least 5, for the special tokens"],
        ),
        (
            ["--input", CORPUS, "--output-dir", "x", "--vocab-size", 300, "--tokenizer-type", "SentencePieceTokenizer"],
            ["--vocab-size 300: bytes and characters alone take 405"],
        ),
        (["--input", CORPUS, "--output-dir", "x", "--json-keys", "txt"], [f"{CORPUS}:1: no key 'txt'"]),
        (["--input", CORPUS, "--output-dir", CORPUS, "--vocab-size", 300], [f"--output-dir {CORPUS}:"]),
    ],
)
def test_mistakes(train, words, says):
    code, _, errors = train(*words)
    assert code == 2
    for line, wanted in zip(errors.splitlines(), says, strict=True):
        assert line.startswith(f"error: {wanted}")
