"""megatron/data/tokenizer/gpt2_bpe.py: ids of ByteLevelBPETokenizer; special tokens are never matched."""

import json
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer

BPE = Path(__file__).parents[2] / "data/golden/corpus/gpt2bpe"
CORPUS = BPE.parent / "corpus.jsonl"


@pytest.fixture(scope="module")
def ours():
    return GPT2BPETokenizer(str(BPE / "vocab.json"), str(BPE / "merges.txt"))


def test_ids_of_the_library(ours):
    reference = ByteLevelBPETokenizer(str(BPE / "vocab.json"), str(BPE / "merges.txt"))
    texts = [json.loads(line)["text"] for line in CORPUS.read_text("utf-8").splitlines()]
    expected = [reference.encode(text).ids for text in texts]
    assert [ours.tokenize(text) for text in texts] == expected
    encoded = ours.encode_texts(texts)
    assert encoded.ids.tolist() == [i for ids in expected for i in ids]
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]
    assert [ours.detokenize(ids) for ids in expected] == texts


def test_special_ids(ours):
    assert (ours.vocab_size, ours.eod, ours.pad) == (600, 0, None)
    assert ours.eod not in ours.tokenize("<|endoftext|>") and len(ours.tokenize("<|endoftext|>")) == 11
    assert ours.holds_special_literal("a <|endoftext|>") and not ours.holds_special_literal("<|endoftext>")


def test_digest_is_of_vocabulary_and_merges(ours, tmp_path):
    lines = (BPE / "merges.txt").read_text("utf-8").splitlines()
    (tmp_path / "merges.txt").write_text("\n".join(line for line in lines if line) + "\n\n", "utf-8")
    same = GPT2BPETokenizer(str(BPE / "vocab.json"), str(tmp_path / "merges.txt"))
    lines[5], lines[6] = lines[6], lines[5]
    (tmp_path / "merges.txt").write_text("\n".join(lines), "utf-8")
    other = GPT2BPETokenizer(str(BPE / "vocab.json"), str(tmp_path / "merges.txt"))
    assert ours.digest == same.digest != other.digest


def test_errors_name_flag_and_file(tmp_path):
    vocab, merges = str(BPE / "vocab.json"), str(BPE / "merges.txt")
    with pytest.raises(UserError, match=r"--vocab-file none.json: No such file"):
        GPT2BPETokenizer("none.json", merges)
    with pytest.raises(UserError, match=r"--merge-file none.txt: No such file"):
        GPT2BPETokenizer(vocab, "none.txt")
    bad = tmp_path / "bad"
    bad.write_text("#version: 0.2\na b\nabc\n")
    with pytest.raises(UserError, match=r"--merge-file .*bad:3: 'abc' is not two tokens"):
        GPT2BPETokenizer(vocab, str(bad))
    with pytest.raises(UserError, match=r"--vocab-file .*bad: not JSON"):
        GPT2BPETokenizer(str(bad), merges)
    with pytest.raises(UserError, match=r"vocab.json:1: '\{.{39,45}\.\.\.' is not two tokens .*; is it the vocabulary"):
        GPT2BPETokenizer(vocab, vocab)
    bad.write_text("Ġzz q\n")
    with pytest.raises(UserError, match=r"with --merge-file .*bad: the merges name 'Ġzz'"):
        GPT2BPETokenizer(vocab, str(bad))
    bad.write_text('{"a": "b"}')
    with pytest.raises(UserError, match="not a JSON object from tokens to ids"):
        GPT2BPETokenizer(str(bad), merges)
    bad.write_text('{"a": 0}')
    with pytest.raises(UserError, match=r"no '<\|endoftext\|>'"):
        GPT2BPETokenizer(str(bad), merges)
    bad.write_text('{"<|endoftext|>": 0}')
    with pytest.raises(UserError, match="243 bytes have no token"):
        GPT2BPETokenizer(str(bad), merges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"th": 5_000_000_000}, "the id 5000000000 of 'th' is larger than 2147483647"),
        ({"th": 65}, "'[^']+' and 'th' have the same id 65"),
    ],
)
def test_ids_that_no_vocabulary_has(tmp_path: Path, change: dict[str, int], message: str) -> None:
    vocab = json.loads((BPE / "vocab.json").read_text("utf-8"))
    assert change.keys() <= vocab.keys()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | change))
    with pytest.raises(UserError, match=message):
        GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(BPE / "merges.txt"))


def test_merges_that_were_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of a line, where nothing else shows it."""
    GPT2BPETokenizer(str(BPE / "vocab.json"), str(BPE / "merges.txt"))
    assert not caplog.records
    lines = (BPE / "merges.txt").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "merges.txt").write_text("".join(lines[:-3]), "utf-8")
    GPT2BPETokenizer(str(BPE / "vocab.json"), str(tmp_path / "merges.txt"))
    assert "3 tokens of the vocabulary are made by no merge, the first is" in caplog.text
