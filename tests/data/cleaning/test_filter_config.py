"""megatron/data/cleaning/filter_config.py: impossible values are named."""

from megatron.data.cleaning.filter_config import FilterConfig


def test_problems():
    assert [problem.split(":")[0] for problem in FilterConfig().validate()] == ["{input", "{output"]
    good = {"input": ["a"], "output": "b"}
    assert not list(FilterConfig(**good).validate())
    bad = FilterConfig(**good, min_characters=5, max_characters=4, ngram_words=0, drop_if_matches=["("])
    assert [problem.split(":")[0] for problem in bad.validate()] == [
        "{ngram_words}",
        "{max_characters}",
        "{drop_if_matches",
    ]
