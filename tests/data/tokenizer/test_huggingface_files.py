"""megatron/data/tokenizer/huggingface_files.py: the tokens of all files of a folder, as in transformers."""

import json
import random

import pytest
from tokenizers import AddedToken

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from tests.support.huggingface_folders import byte_level_json, write_folder

SPELLINGS = [*(f"<|{letter}|>" for letter in "abcdef"), "x", "<pad>"]


def any_token(rng):
    flags = {name: rng.random() < 0.3 for name in ("lstrip", "rstrip", "single_word") if rng.random() < 0.3}
    spelling = rng.choice(SPELLINGS)
    return {"__type": "AddedToken", "content": spelling, **flags} if rng.random() < 0.3 else spelling


def any_folder(folder, rng):
    """A tokenizer whose tokens are named in any of the files, several times and differently."""
    own, rest = SPELLINGS[: rng.randrange(3)], SPELLINGS[3:6]
    made = byte_level_json(added=[AddedToken(token, normalized=False) for token in own])
    config = {role: any_token(rng) for role in ("bos_token", "pad_token", "image_token") if rng.random() < 0.4}
    for name in ("additional_special_tokens", "extra_special_tokens"):
        config |= {name: [any_token(rng) for _ in range(rng.randrange(4))]} if rng.random() < 0.4 else {}
    config |= {"extra_special_tokens": {"video_token": rng.choice(SPELLINGS)}} if rng.random() < 0.2 else {}
    first = len(json.loads(made.to_str())["model"]["vocab"]) + len(own)
    numbered = {str(first + i): {"content": token, "special": rng.random() < 0.5} for i, token in enumerate(rest)}
    config |= {"added_tokens_decoder": numbered} if rng.random() < 0.4 else {}
    write_folder(folder, made, **config)
    roles = {role: rng.choice(SPELLINGS) for role in ("eos_token", "pad_token", "mask_token") if rng.random() < 0.5}
    lists = [{name: SPELLINGS[4:7]} for name in ("additional_special_tokens", "extra_special_tokens")]
    lists += [{}, {"extra_special_tokens": {"video_token": "<|g|>"}}]
    if rng.random() < 0.5:
        (folder / "special_tokens_map.json").write_text(json.dumps(roles | rng.choice(lists)))
    if rng.random() < 0.4:
        (folder / "added_tokens.json").write_text(json.dumps({token: first + i for i, token in enumerate(rest)}))
    return folder


@pytest.mark.parametrize("seed", range(5))
def test_tokens_of_all_files_have_the_ids_of_transformers(seed, tmp_path):
    import transformers

    rng = random.Random(seed)
    for number in range(8):
        folder = any_folder(tmp_path / str(number), rng)
        batch = ["".join(rng.choice([*SPELLINGS, " ", "X", "\n"]) for _ in range(12)) for _ in range(3)]
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = HuggingFaceTokenizer(str(folder))
        expected = [theirs(text, add_special_tokens=False).input_ids for text in batch]
        assert [ours.tokenize(text) for text in batch] == expected
        assert ours.encode_texts(batch).ids.tolist() == [i for ids in expected for i in ids]
        assert ours.vocab_size == len(theirs)
        assert set(theirs.special_tokens_map.values()) <= set(ours.special_literals)
        roles = {role: theirs.convert_tokens_to_ids(token) for role, token in theirs.special_tokens_map.items()}
        assert roles.items() <= ours.special_tokens_dict.items()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer_config.json", {"eos_token": {"text": "</s>"}}, "eos_token is not a token; expected a text, or"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token is not a token"),
        (
            "tokenizer_config.json",
            {"eos_token": {"content": "a", "lstrip": 1}},
            "eos_token has lstrip 1; expected true",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": [["a"]]}, r"extra_special_tokens\[0\] is not a token"),
        ("tokenizer_config.json", {"additional_special_tokens": "ab"}, "extra_special_tokens is not a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["a"]}, "added_tokens_decoder is not an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"a": {"content": "b"}}}, "'a' is not an id of a token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"600": "b", "601": 1}}, "added_tokens_decoder 601 is not"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4000000000": "b"}}, "ids go from 0 to 2147483647"),
        ("special_tokens_map.json", {"bos_token": []}, "bos_token is not a token"),
        ("added_tokens.json", {"a": 4e9}, "4000000000.0 is not an id of a token"),
        ("added_tokens.json", {"zz": 700}, "'zz' has id 700 there, but would be 600"),
    ],
)
def test_a_token_that_is_none_is_refused_with_its_file(file, content, says, tmp_path):
    write_folder(tmp_path, byte_level_json())
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{file}: .*{says}"):
        HuggingFaceTokenizer(str(tmp_path))


def test_ids_beyond_32_bits_and_deep_files_are_refused(tmp_path):
    write_folder(tmp_path, byte_level_json())
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"]["vocab"]["!"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="token '!' has the id 4000000000; ids go up to 2147483647"):
        HuggingFaceTokenizer(str(tmp_path))
    for name in ("tokenizer.json", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"):
        folder = write_folder(tmp_path / f"deep {name}", byte_level_json())
        (folder / name).write_text('{"a":' * 20000 + "1" + "}" * 20000)
        with pytest.raises(UserError, match=f"{name}: not "):
            HuggingFaceTokenizer(str(folder))
    with pytest.raises(UserError, match=r"--tokenizer-model nnn.*: no such folder or file"):
        HuggingFaceTokenizer("n" * 300)
