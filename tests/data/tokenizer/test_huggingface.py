"""megatron/data/tokenizer/huggingface.py: ids as transformers reads the same folder; errors that say what to do."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.byte_level import MAX_DIGITS_OF_PATTERN
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from tests.support.huggingface_folders import byte_level_json, write_folder

GOLDEN = Path(__file__).parents[2] / "data/golden/corpus"
TEXTS = [
    "",
    " ",
    "Hello  world\n\n  x",
    "<|endoftext|>",
    " <|endoftext|>  <|endoftext|>a<|endof",
    "naïve cafe\u0301 你好 1234567 'LL \u212b",
    "a  <tool>b</tool>  \n    c",
]
pieces = st.sampled_from(
    ["<|endoftext|>", "<tool>", "</tool>", " ", "    ", "\n", "'s", "12", "e\u0301", "\u212b", "abc "]
)
texts = st.lists(st.one_of(pieces, st.text(max_size=5)), max_size=12).map("".join)


TOOLS = (AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False))
BLANKS = (AddedToken("    ", normalized=False), AddedToken("  ", normalized=False))
FAST = {
    "plain": byte_level_json(),
    "tools": byte_level_json(added=TOOLS),
    "blanks": byte_level_json(added=TOOLS + BLANKS),
    "nfc": byte_level_json(normalizer=normalizers.NFC(), added=TOOLS),
    "prefix space": byte_level_json(add_prefix_space=True, added=TOOLS),
    **{
        f"cl100k {digits}": byte_level_json(pattern=pattern, ignore_merges=digits == 3)
        for pattern, digits in MAX_DIGITS_OF_PATTERN.items()
        if digits
    },
}
SLOW = {
    "its normalizer is Lowercase": byte_level_json(normalizer=normalizers.Lowercase()),
    "matches the blanks": byte_level_json(added=[AddedToken("<tool>", lstrip=True, normalized=False)]),
    "matched after the others": byte_level_json(added=[AddedToken("<tool>", normalized=True)]),
    "no compiled scanner|there is a compiled scanner": byte_level_json(pattern=r"\w+|\W+"),
}


def assert_ids_of_transformers(folder: Path, batch, **flags):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = HuggingFaceTokenizer(str(folder), **flags)
    include = flags.get("include_special_tokens", False)
    expected = [theirs(text, add_special_tokens=include).input_ids for text in batch]
    assert [ours.tokenize(text) for text in batch] == expected
    encoded = ours.encode_texts(batch)
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]
    assert encoded.ids.tolist() == [i for ids in expected for i in ids]
    assert ours.vocab_size == len(theirs)
    assert ours.eod == theirs.eos_token_id
    return ours


@pytest.mark.parametrize("name", FAST)
def test_fast_path(name, tmp_path):
    ours = assert_ids_of_transformers(write_folder(tmp_path / "hf", FAST[name]), TEXTS)
    assert ours.speed_note is None

    @settings(max_examples=30, deadline=None, database=None, derandomize=True)
    @given(st.lists(texts, max_size=3))
    def check(batch):
        expected = [ours.tokenize(text) for text in batch]
        encoded = ours.encode_texts(batch)
        assert encoded.lengths.tolist() == [len(ids) for ids in expected]
        assert encoded.ids.tolist() == [i for ids in expected for i in ids]

    check()


@pytest.mark.parametrize("reason", SLOW)
def test_slow_path_says_why(reason, tmp_path):
    ours = assert_ids_of_transformers(write_folder(tmp_path / "hf", SLOW[reason]), TEXTS)
    assert any(part in ours.speed_note for part in reason.split("|"))


def test_template_only_when_asked(tmp_path):
    made = byte_level_json(added=TOOLS)
    made.post_processor = processors.TemplateProcessing(
        single="<tool> $A </tool>", special_tokens=[("<tool>", 600), ("</tool>", 601)]
    )
    folder = write_folder(tmp_path / "hf", made)
    assert assert_ids_of_transformers(folder, TEXTS).speed_note is None
    ours = assert_ids_of_transformers(folder, TEXTS, include_special_tokens=True)
    assert ours.tokenize("")[0] == 600 and "adds tokens" in ours.speed_note


def test_truncation_and_padding_of_the_file_are_left_out(tmp_path):
    made = byte_level_json()
    made.enable_truncation(3)
    made.enable_padding(length=50, pad_id=0, pad_token="<|endoftext|>")
    assert len(assert_ids_of_transformers(write_folder(tmp_path / "hf", made), TEXTS).tokenize("Hello world")) > 3


def test_tokens_that_only_the_config_names(tmp_path):
    added = {"600": {"content": "<tool>", "special": True, "normalized": False}}
    folder = write_folder(tmp_path / "hf", byte_level_json(), added_tokens_decoder=added, pad_token="<pad>")
    ours = assert_ids_of_transformers(folder, ["a<tool>b<pad>c"])
    assert (ours.pad, ours.vocab_size) == (601, 602)
    assert ours.holds_special_literal("x <pad>") and not ours.holds_special_literal("x <pad")


def test_a_failure_inside_of_the_library_is_one_sentence(tmp_path):
    """The library's regular expressions stop after ten million steps, by a panic."""
    folder = write_folder(tmp_path / "hf", byte_level_json(pattern="(a+)+$"))
    ours = HuggingFaceTokenizer(str(folder))
    for encode in (ours.tokenize, lambda text: ours.encode_texts([text])):
        with pytest.raises(
            UserError, match=r"tokenizer.json: the tokenizers library cannot encode a text: .*retry-limit"
        ):
            encode("a" * 40 + "!")


def test_special_tokens_stand_in_for_each_other(tmp_path):
    folder = write_folder(tmp_path / "hf", byte_level_json(), eos_token=None, sep_token="<|endoftext|>", cls_token="!")
    ours = HuggingFaceTokenizer(str(folder))
    assert (ours.eod, ours.bos, ours.pad) == (0, 1, None)


def test_a_lone_file(tmp_path):
    shutil.copy(GOLDEN / "hf/tokenizer.json", tmp_path / "mine.json")
    lone = HuggingFaceTokenizer(str(tmp_path / "mine.json"))
    assert lone.eod == 0 and lone.tokenize("year") == HuggingFaceTokenizer(str(GOLDEN / "hf")).tokenize("year")


def test_digest_is_of_what_determines_ids(tmp_path):
    folder = write_folder(tmp_path / "a", byte_level_json())
    same = write_folder(tmp_path / "b", byte_level_json(), model_max_length=17)
    more = write_folder(tmp_path / "c", byte_level_json(added=TOOLS))
    first = HuggingFaceTokenizer(str(folder)).digest
    assert first == HuggingFaceTokenizer(str(same)).digest != HuggingFaceTokenizer(str(more)).digest
    assert first != HuggingFaceTokenizer(str(folder), include_special_tokens=True).digest


def test_round_trip():
    ours = HuggingFaceTokenizer(str(GOLDEN / "hf"))
    assert ours.detokenize(ours.tokenize("naïve 你好 <|endoftext|>")) == "naïve 你好 <|endoftext|>"


def test_errors_name_flag_and_file(tmp_path):
    with pytest.raises(UserError, match=r"--tokenizer-model meta/some: no such folder .*nothing is downloaded"):
        HuggingFaceTokenizer("meta/some")
    with pytest.raises(UserError, match=r"no tokenizer.json in it; a folder with only a slow tokenizer"):
        HuggingFaceTokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"--tokenizer-type GPT2BPETokenizer --vocab-file .*vocab.json"):
        HuggingFaceTokenizer(str(GOLDEN / "gpt2bpe"))
    with pytest.raises(UserError, match=r"vocab.json: not a tokenizer.json; --tokenizer-type GPT2BPETokenizer"):
        HuggingFaceTokenizer(str(GOLDEN / "gpt2bpe" / "vocab.json"))
    model = tmp_path / "tokenizer.model"
    for content, family in ((b"IQ== 0\n", "TikTokenizer"), (b"\n\x0e\n\x05", "SentencePieceTokenizer")):
        model.write_bytes(content)
        for place in (tmp_path, model):
            with pytest.raises(UserError, match=rf"--tokenizer-type {family} --tokenizer-model .*.model reads what is"):
                HuggingFaceTokenizer(str(place))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json: not a tokenizer.json"):
        HuggingFaceTokenizer(str(tmp_path))
    byte_level_json(added=["</s>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="nothing says which token ends a document"):
        HuggingFaceTokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config.json: not a JSON object"):
        HuggingFaceTokenizer(str(tmp_path))
    wrong = {"700": {"content": "<x>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": wrong}))
    with pytest.raises(UserError, match=r"'<x>' has id 700 there, but would be 601"):
        HuggingFaceTokenizer(str(tmp_path))


def word_piece_folder(folder, sentinels=()):
    """A BERT tokenizer as transformers saves it; `sentinels` are added tokens."""
    tokens = (GOLDEN / "bert/vocab.txt").read_text().split()
    made = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    made.add_special_tokens([*special.values(), *sentinels])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return str(folder)


def test_special_tokens_of_bert_and_sentinels_of_t5(tmp_path):
    folder = word_piece_folder(tmp_path / "bert")
    plain, more = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(folder, vocab_extra_ids=3)
    assert (plain.cls, plain.sep, plain.mask, plain.pad, plain.bos, plain.eos) == (2, 3, 4, 0, 2, 3)
    assert plain.additional_special_tokens_ids == []
    size = plain.vocab_size
    assert more.additional_special_tokens_ids == [size, size + 1, size + 2] and more.vocab_size == size + 3
    assert list(more.inv_vocab) == sorted(more.inv_vocab) and more.inv_vocab[size] == "<extra_id_0>"
    assert more.vocab["[MASK]"] == 4 and any(token.startswith("##") for token in more.inv_vocab.values())
    assert more.detokenize([size, *plain.tokenize("he is"), size + 1]) == "<extra_id_0>he is<extra_id_1>"
    text = "a <extra_id_0> b"
    assert more.tokenize(text) == plain.tokenize(text) and more.digest == plain.digest


def test_a_folders_own_sentinels_keep_their_ids(tmp_path):
    folder = word_piece_folder(tmp_path / "t5", ["<extra_id_1>", "<extra_id_0>"])  # like T5's, in falling order
    own = HuggingFaceTokenizer(folder)
    size = own.vocab_size
    assert own.additional_special_tokens_ids == [size - 1, size - 2]
    assert HuggingFaceTokenizer(folder, vocab_extra_ids=1).additional_special_tokens_ids == [size - 1, size - 2]
    more = HuggingFaceTokenizer(folder, vocab_extra_ids=4)
    assert more.additional_special_tokens_ids == [size - 1, size - 2, size, size + 1]
