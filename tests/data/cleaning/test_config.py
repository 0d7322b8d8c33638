"""megatron/data/cleaning/config.py: impossible values are named."""

from megatron.data.cleaning.config import DedupConfig, FilterConfig


def test_problems_of_dedup():
    assert [problem.split(":")[0] for problem in DedupConfig().validate()] == ["{input", "{output"]
    good = {"input": ["a"], "output": "b"}
    assert not list(DedupConfig(**good).validate())
    assert list(DedupConfig(**good, threshold=0.0, workers=0).validate()) == [
        "{threshold}: must be above 0 and at most 1",
        "{workers}: must be at least 1",
    ]


def test_problems_of_filters():
    assert [problem.split(":")[0] for problem in FilterConfig().validate()] == ["{input", "{output"]
    good = {"input": ["a"], "output": "b"}
    assert not list(FilterConfig(**good).validate())
    bad = FilterConfig(**good, min_characters=5, max_characters=4, ngram_words=0, drop_if_matches=["("])
    assert [problem.split(":")[0] for problem in bad.validate()] == [
        "{ngram_words}",
        "{max_characters}",
        "{drop_if_matches",
    ]
