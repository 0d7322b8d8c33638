"""megatron/data/tokenizer/sentencepiece.py: ids of the sentencepiece package; tokens added as in older releases."""

import io
import json
import pickle
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from support import tricky_text

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.sentencepiece import SentencePieceTokenizer

CORPUS = Path(__file__).parents[2] / "data/golden/corpus/corpus.jsonl"


def make_model(path: Path, **options) -> str:
    lines = [json.loads(line)["text"] for line in CORPUS.read_text("utf-8").splitlines()]
    written = io.BytesIO()
    settings = {"vocab_size": 420, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **settings)
    path.write_bytes(written.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sentencepiece")


@pytest.fixture(scope="module")
def llama(folder):
    """Like Llama 2's: BPE, text as it is."""
    as_it_is = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return make_model(folder / "llama.model", model_type="bpe", **as_it_is)


@pytest.fixture(scope="module")
def unigram(folder):
    """Like T5's: unigram, blanks are joined; with a pad piece, <CLS> and an <extra_id_1> of its own."""
    return make_model(folder / "t5.model", pad_id=3, user_defined_symbols=["<CLS>", "<extra_id_1>"])


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_ids_of_the_library(request, name):
    path = request.getfixturevalue(name)
    theirs = sentencepiece.SentencePieceProcessor(model_file=path)
    ours = SentencePieceTokenizer(path)
    later = SentencePieceTokenizer(path, "Llama2Tokenizer", adds_bos=True)

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(tricky_text.texts)
    def check(text):
        assert ours.tokenize(text) == theirs.encode(text)
        assert later.tokenize(text) == [theirs.bos_id(), *theirs.encode(text)]
        assert ours.detokenize(theirs.encode(text)) == theirs.decode(theirs.encode(text))

    check()
    texts = ["the  time", "", "</s> came\n", "naïve 你好"]
    for tokenizer in (ours, later, pickle.loads(pickle.dumps(later))):
        encoded = tokenizer.encode_texts(texts)
        assert encoded.ids.tolist() == [i for text in texts for i in tokenizer.tokenize(text)]
        assert encoded.lengths.tolist() == [len(tokenizer.tokenize(text)) for text in texts]
    assert (ours.vocab_size, ours.eod, ours.bos) == (theirs.get_piece_size(), theirs.eos_id(), theirs.bos_id())
    assert ours.vocab["</s>"] == ours.eod and ours.inv_vocab[ours.eod] == "</s>" and ours.cls == -1


def test_spellings_of_control_pieces_are_ordinary_text(llama):
    ours = SentencePieceTokenizer(llama)
    assert ours.special_literals == ("<s>", "</s>") and not ours.matches_special_literals
    assert not {ours.bos, ours.eod} & set(ours.tokenize("<s>the</s>")) and ours.holds_special_literal("the</s>")
    assert ours.pad is None


def test_tokens_are_added_after_the_models(llama, unigram):
    plain = SentencePieceTokenizer(llama)
    size = plain.vocab_size
    ours = SentencePieceTokenizer(llama, adds_special_tokens=True, extra_ids=2)
    assert [ours.inv_vocab[size + k] for k in range(7)] == [
        *("<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<extra_id_0>", "<extra_id_1>")
    ]
    assert (ours.cls, ours.sep, ours.eod, ours.mask, ours.pad) == tuple(range(size, size + 5))
    assert ours.vocab_size == size + 7 and ours.bos == plain.bos
    assert ours.additional_special_tokens_ids == [size + 5, size + 6]
    assert ours.tokenize("the<MASK> time</s>") == [
        *plain.tokenize("the"), ours.mask, *plain.tokenize(" time"), plain.eod,
    ]  # fmt: skip
    assert ours.detokenize([*plain.tokenize("the"), ours.mask, *plain.tokenize("time")]) == "the <MASK> time"
    assert ours.encode_texts(["<EOD>", "a"]).ids.tolist() == [ours.eod, *plain.tokenize("a")]
    assert ours.speed_note == "--tokenizer-sentencepiece-legacy looks for special tokens in each text"
    t5 = SentencePieceTokenizer(unigram, adds_special_tokens=True, extra_ids=2)
    size = SentencePieceTokenizer(unigram).vocab_size
    assert (t5.pad, t5.sep, t5.eod) == (3, size, size + 1)  # pad and <CLS> are the model's
    assert t5.cls == t5.vocab["<CLS>"] < size
    assert t5.additional_special_tokens_ids == [size + 3, t5.vocab["<extra_id_1>"]] and t5.vocab_size == size + 4


def test_digests_are_equal_where_ids_of_texts_are(llama, unigram):
    plain = SentencePieceTokenizer(llama)
    legacy = [SentencePieceTokenizer(llama, adds_special_tokens=True, extra_ids=count) for count in (0, 100)]
    bos = SentencePieceTokenizer(llama, "Llama2Tokenizer", adds_bos=True)
    assert plain.digest == SentencePieceTokenizer(llama, "GPTSentencePieceTokenizer").digest
    assert legacy[0].digest == legacy[1].digest
    assert len({plain.digest, legacy[0].digest, bos.digest, SentencePieceTokenizer(unigram).digest}) == 4


def test_flags(llama):
    def built(family, **values):
        return build_tokenizer(TokenizerConfig(tokenizer_type=family, tokenizer_model=llama, **values))

    plain = built("GPTSentencePieceTokenizer", legacy_tokenizer=True).tokenize("<s>the time")
    assert built("Llama2Tokenizer").tokenize("<s>the time") == plain
    assert built("Llama2Tokenizer", legacy_tokenizer=True).tokenize("<s>the time") == [1, *plain]
    for flag in ("legacy_tokenizer", "tokenizer_sentencepiece_legacy"):
        assert built("SentencePieceTokenizer", **{flag: True}, vocab_extra_ids=3).vocab_size == 420 + 5 + 3
    with pytest.raises(UserError, match="has no extra ids without tokenizer_sentencepiece_legacy"):
        built("SentencePieceTokenizer", vocab_extra_ids=3)


def test_mistakes(folder, llama, unigram):
    (folder / "text.model").write_text("no model")
    without_end = make_model(folder / "endless.model", eos_id=-1, bos_id=-1)
    for arguments, says in [
        ({"model": str(folder / "none")}, "--tokenizer-model .*none: No such file or directory; a SentencePiece"),
        ({"model": str(folder / "text.model")}, "text.model: not a SentencePiece .model file"),
        ({"model": without_end}, "no end-of-sentence piece, so nothing ends a document; --tokenizer-sentencepiece-l"),
        ({"model": without_end, "adds_special_tokens": True, "adds_bos": True}, None),
        ({"model": unigram, "keeps_blanks": True}, "this model joins runs of blanks; train one that keeps them"),
        ({"model": llama, "keeps_blanks": True}, None),
    ]:
        if says is None:
            SentencePieceTokenizer(**arguments)
        else:
            with pytest.raises(UserError, match=says):
                SentencePieceTokenizer(**arguments)
