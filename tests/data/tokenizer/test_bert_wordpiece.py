"""megatron/data/tokenizer/bert_wordpiece.py: words and pieces of BERT's own code, ids after the file's lines."""

import pickle
import string
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tricky_text

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.bert_wordpiece import BertWordPieceTokenizer, cut_words

VOCAB = Path(__file__).parents[2] / "data/golden/corpus/bert/vocab.txt"
HARD = [
    "İSTANBUL",
    "ΟΔΟΣ σας Σ",
    "Ａ１",
    "中文a한국ｶﾅ",
    "\ufa0e\U0002b820",
    "$5+3^x`~_",
    "ﬁﬂ ǅ ẞß",
    "a\u00adb\u200dc\x00\ufffd",
]
SPELLED = ["[CLS]", " [MASK]x", "[sep]", "<extra_id_0>", "##ing", "don't"]
texts = st.one_of(tricky_text.texts, st.lists(st.sampled_from(HARD + SPELLED), max_size=6).map("".join))


def no_character(text):
    """Whether code points are in it that stand for none: unassigned and private ones."""
    return any(unicodedata.category(c) in ("Cn", "Co", "Cs") for c in text)


@pytest.fixture(scope="module")
def rich_vocab(tmp_path_factory):
    """The golden vocabulary and pieces for what random text is made of, so that few words are [UNK]."""
    characters = set("".join(HARD + tricky_text.TRICKY) + string.printable) | set("ςσδοçéàäöüßŝ中文你好")
    characters |= set(unicodedata.normalize("NFD", "".join(characters).lower()))
    known = VOCAB.read_text("utf-8").splitlines()
    new = {c for c in characters if not c.isspace()} | {f"##{c}" for c in characters if not c.isspace()}
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join([*known, *sorted(new - set(known))]) + "\n", "utf-8")
    return str(path)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_of_the_python_tokenizer_of_transformers(rich_vocab, lower_case):
    theirs = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    ours = BertWordPieceTokenizer(rich_vocab, lower_case)
    basic = theirs.BasicTokenizer(do_lower_case=lower_case)
    pieces = theirs.WordpieceTokenizer(ours.vocab, "[UNK]", max_input_chars_per_word=200)

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(texts.map(lambda text: unicodedata.normalize("NFC", text)).filter(lambda text: not no_character(text)))
    def check(text):
        expected = [ours.vocab[piece] for word in basic.tokenize(text) for piece in pieces.tokenize(word)]
        assert ours.tokenize(text) == expected

    check()
    for text in (*HARD, *SPELLED):
        check.hypothesis.inner_test(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_of_the_library_where_it_agrees_with_python(rich_vocab, lower_case):
    ours = BertWordPieceTokenizer(rich_vocab, lower_case)
    model = tokenizers.models.WordPiece(ours.vocab, unk_token="[UNK]", max_input_chars_per_word=200)
    library = tokenizers.Tokenizer(model)
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case, strip_accents=lower_case)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    letters = st.text(st.characters(max_codepoint=0x4FFF, categories=["L", "N", "Zs"], exclude_characters="Σ"))

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.one_of(letters, st.text(st.characters(max_codepoint=0x2FF), max_size=40)))
    def check(text):
        assert ours.tokenize(text) == library.encode(text, add_special_tokens=False).ids

    check()


def test_characters_without_a_category_of_theirs_stay():
    assert cut_words("a\U0010ffffb \ue000", True) == ["a\U0010ffffb", "\ue000"]


def test_a_word_of_more_than_200_characters_is_unknown():
    ours = BertWordPieceTokenizer(str(VOCAB), lower_case=True)
    assert len(ours.tokenize("a" * 200)) > 1
    assert ours.tokenize("a" * 201) == [1]
    assert ours.tokenize("e\u0301" * 200) == ours.tokenize("e" * 200)  # counted when the accents are gone


def test_ids_after_the_file(tmp_path):
    plain, more = (BertWordPieceTokenizer(str(VOCAB), True, extra) for extra in (0, 3))
    assert (plain.vocab_size, plain.eod, plain.bos, plain.pad) == (512, 511, 510, 0)
    assert (plain.cls, plain.sep, plain.mask, more.vocab_size) == (2, 3, 4, 515)
    assert plain.special_tokens_dict == {
        "cls_token": 2,
        "sep_token": 3,
        "pad_token": 0,
        "mask_token": 4,
        "unk_token": 1,
        "bos_token": 510,
        "eos_token": 511,
    }
    assert more.additional_special_tokens_ids == [512, 513, 514] and more.inv_vocab[513] == "<extra_id_1>"
    assert plain.tokenize("[CLS] <extra_id_0>") == more.tokenize("[CLS] <extra_id_0>")
    assert not {2, 512} & set(more.tokenize("[CLS] <extra_id_0>")) and not more.matches_special_literals
    assert more.holds_special_literal("<extra_id_2>") and not plain.holds_special_literal("<extra_id_2>")
    with_them = tmp_path / "vocab.txt"
    with_them.write_text("[EOS]\n[PAD]\n[UNK]\n\n[CLS]\r\n[SEP]\n[MASK]\n<extra_id_1>\nword", "utf-8")
    own = BertWordPieceTokenizer(str(with_them), False, 2)
    assert (own.eod, own.bos, own.vocab_size, own.cls) == (0, 9, 11, 4)
    assert own.additional_special_tokens_ids == [10, 7] and own.tokenize("word Word") == [8, 2]


def test_digest_is_of_the_ids_of_texts(tmp_path):
    """Data for T5 is prepared before <extra_id_i> are added; those who add them may read it."""
    lower, extra, cased = (BertWordPieceTokenizer(str(VOCAB), *how) for how in ((True,), (True, 100), (False,)))
    assert lower.digest == extra.digest != cased.digest
    longer = tmp_path / "vocab.txt"
    longer.write_text(VOCAB.read_text("utf-8") + "zebra\n", "utf-8")
    assert BertWordPieceTokenizer(str(longer), True).digest != lower.digest


def test_batches_copies_and_back():
    ours = BertWordPieceTokenizer(str(VOCAB), True, 1)
    batch = ["The year is", "", "Naïve ΟΔΟΣ.", "the the"]
    copy = pickle.loads(pickle.dumps(ours))
    for tokenizer in (ours, copy):
        encoded = tokenizer.encode_texts(batch)
        assert encoded.ids.tolist() == [i for text in batch for i in ours.tokenize(text)]
        assert encoded.lengths.tolist() == [len(ours.tokenize(text)) for text in batch]
    assert copy.digest == ours.digest and copy.vocab_size == 513
    assert ours.detokenize([*ours.tokenize("The year, is"), 511, 512]) == "the year , is [EOS] <extra_id_0>"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "vocab.txt: No such file or directory"),
        (b"[PAD]\n\xff", "vocab.txt: not UTF-8"),
        (b"[PAD]\n[UNK]\n[SEP]\na\n", r"vocab.txt: no \[CLS\], \[MASK\] among its 4 lines"),
        (b"[PAD]\n[CLS]\n[SEP]\n[MASK]\n", r"no \[UNK\] among"),
        (b"[PAD]\na\nb\n a\n", "vocab.txt:4: 'a' is also in line 2"),
    ],
)
def test_errors_name_flag_and_file(tmp_path, content, says):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"--vocab-file {tmp_path}/.*{says}"):
        BertWordPieceTokenizer(str(path), True)
