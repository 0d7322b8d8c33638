"""megatron/data/datasets/utils.py: splits equal to Megatron-LM's, blends, and what is wrong with the others."""

import json

import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.utils import (
    get_blend_from_list,
    parse_split,
    read_blend_file,
    read_blend_per_split_file,
    split_bounds,
    split_matrix,
)


def test_golden_split_strings(golden):
    cases = json.loads((golden / "split_strings.json").read_text())
    assert len(cases) >= 7
    for case in cases:
        shares = parse_split(case["split"])
        matrix = split_matrix(shares)
        assert shares == case["vector"]
        assert [share and list(share) for share in matrix] == case["matrix"]
        assert [share and list(split_bounds(share, 189)) for share in matrix] == case["bounds_189"]


@pytest.mark.parametrize("split", ["90/5/5", "'90,5,5'", "90 5 5"])
def test_any_separator(split):
    assert parse_split(split) == parse_split("90,5,5")


@pytest.mark.parametrize(
    "split", ["", "a,b", "1,2,3,4", "0,0,0", "1.2.3,1,1", "-1,2,3", "90,-5,5", "90,20,x", "1e3,1", "nan,1,1"]
)
def test_bad_splits_are_named(split):
    with pytest.raises(UserError, match="--split"):
        parse_split(split)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (None, None),
        ([], None),
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["30", "a"], (["a"], [30.0])),
        (["30", "a", "0.7", "b"], (["a", "b"], [30.0, 0.7])),
        (["30", "a", "b"], (["30", "a", "b"], None)),
        ([" 1 ", " a "], (["a"], [1.0])),
    ],
)
def test_blend_words(words, blend):
    assert get_blend_from_list(words) == blend


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["30", "a", "x", "b"], "'x' is in the position of a weight"),
        (["-1", "a", "2", "b"], "-1"),
        (["nan", "a", "2", "b"], "nan"),
        (["0", "a", "0", "b"], "above zero"),
        (["1e308", "a", "1e308", "b"], "sum must be finite"),
    ],
)
def test_bad_blends_are_named(words, message):
    with pytest.raises(UserError, match=message):
        get_blend_from_list(words)


def test_blends_from_files(tmp_path):
    (tmp_path / "words.txt").write_text("30 a\n70 b\n")
    assert read_blend_file(tmp_path / "words.txt") == (["a", "b"], [30.0, 70.0])
    (tmp_path / "splits.json").write_text(json.dumps({"train": "1 a 2 b", "valid": ["c"]}))
    assert read_blend_per_split_file(tmp_path / "splits.json") == [(["a", "b"], [1.0, 2.0]), (["c"], None), None]


@pytest.mark.parametrize(
    ("content", "message"),
    [("1 a b 2", "'b' is in the position of a weight"), ("0 a 0 b", "above zero"), ("\udcff", "not a text in UTF-8")],
)
def test_bad_files_of_words_are_named(tmp_path, content, message):
    (tmp_path / "words.txt").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=rf"--data-args-path .*words\.txt: .*{message}"):
        read_blend_file(tmp_path / "words.txt")


@pytest.mark.parametrize("content", ["{", "[]", '{"training": "a"}', '{"train": 3}', '{"valid": "1 a b 2"}', "\udcff"])
def test_bad_per_split_files_are_named(tmp_path, content):
    (tmp_path / "splits.json").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"--per-split-data-args-path .*splits\.json"):
        read_blend_per_split_file(tmp_path / "splits.json")
    with pytest.raises(UserError, match="No such file"):
        read_blend_per_split_file(tmp_path / "absent.json")
