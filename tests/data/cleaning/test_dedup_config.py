"""megatron/data/cleaning/dedup_config.py: impossible values are named."""

from megatron.data.cleaning.dedup_config import DedupConfig


def test_problems():
    assert [problem.split(":")[0] for problem in DedupConfig().validate()] == ["{input", "{output"]
    good = {"input": ["a"], "output": "b"}
    assert not list(DedupConfig(**good).validate())
    assert list(DedupConfig(**good, threshold=0.0, workers=0).validate()) == [
        "{threshold}: must be above 0 and at most 1",
        "{workers}: must be at least 1",
    ]
