"""Numbers as people write them."""

import pytest

from megatron.diagnosis.planning.quantities import length, percentage, quantity, short, switch, whole_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7B", 7e9), ("7 billion", 7e9), ("13e9", 13e9), ("6,738,415,616", 6738415616), ("1.3B parameters", 1.3e9),
        ("671B total, 37B active", 671e9), ("2T", 2e12), ("1.4 trillion tokens", 1.4e12), ("350M", 350e6), ("64", 64),
        ("about 70B", 70e9), ("10,000 tokens/s/GPU", 10_000), (".5B", 0.5e9), ("8x7B", 56e9),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float) -> None:
    assert quantity(text).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("7B", (6.5e9, 6.74e9, 7.5e9), (6.4e9, 7.6e9)),
        ("340M", (336e6, 344e6), (334e6, 346e6)),
        ("200B", (186e9, 214e9), (180e9, 220e9)),
        ("13e9", (12.6e9, 13.02e9), (12.4e9, 13.6e9)),
        ("6.7B", (6.66e9, 6.74e9), (6.6e9, 6.8e9)),
        ("6,738,415,616", (6.71e9, 6.77e9), (6.6e9, 6.8e9)),
    ],
)
def test_rounding_says_how_exact_a_number_is(text, inside, outside) -> None:
    assert all(quantity(text).allows(number) for number in inside)
    assert not any(quantity(text).allows(number) for number in outside)


@pytest.mark.parametrize("text", ["", "many", "0", "-7B", "zero", "0B", "1e999"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="above 0"):
        quantity(text)


def test_other_kinds() -> None:
    assert [length("8192"), length("8k"), length("128K tokens"), length("4,096")] == [8192, 8192, 131072, 4096]
    assert [percentage(text) for text in ("85%", "85", "0.85", "100%")] == [0.85, 0.85, 0.85, 1.0]
    assert [switch(text) for text in ("yes", "No", "true", "yes (dynamic context parallelism)")] == [1, 0, 1, 1]
    assert whole_number("1,024 GPUs") == 1024
    assert [short(value) for value in (6.98e9, 2e12, 350e6, 999.9e9, 12)] == ["6.98B", "2T", "350M", "1T", "12"]
    with pytest.raises(ValueError, match="2 or 3 works"):
        whole_number("2.5")
    with pytest.raises(ValueError, match="percentage"):
        percentage("120%")
