"""docs/framework_keys.md is up to date."""

from pathlib import Path

from megatron.training.config.foreign.page import page


def test_the_page_is_up_to_date() -> None:
    """To make it anew: python -m megatron.training.config.foreign.page"""
    assert (Path(__file__).parents[4] / "docs/framework_keys.md").read_text("utf-8") == page()
