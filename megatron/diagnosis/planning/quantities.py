"""Numbers as people write them in a specification: 7B, 13e9, 6,738,415,616, 2T, 128k, 85%."""

import math
import re
from dataclasses import dataclass

_NUMBER = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)"
_UNITS = {
    "k": 1e3,
    "thousand": 1e3,
    "m": 1e6,
    "million": 1e6,
    "b": 1e9,
    "bn": 1e9,
    "g": 1e9,
    "billion": 1e9,
    "t": 1e12,
    "tn": 1e12,
    "trillion": 1e12,
}
_WITH_UNIT = re.compile(_NUMBER + r"\s*(thousand|million|billion|trillion|bn|tn|[kmbgt])?(?![a-z0-9])", re.IGNORECASE)
_SWITCHES = {"yes": True, "y": True, "true": True, "on": True, "no": False, "n": False, "false": False, "off": False}


@dataclass(frozen=True)
class Quantity:
    """A positive number, and how exactly it was written."""

    value: float
    margin: float
    """Largest difference from `value` that rounding explains: half a unit of the last digit above 0 that was written,
    from 0.5% to 7.5% of the value. 7B may be 6.5 to 7.5 billion; 6,738,415,616 is that number within 0.5%."""

    @property
    def whole(self) -> int:
        """The value as an integer."""
        return round(self.value)

    def allows(self, number: float) -> bool:
        """Whether `number`, rounded as this quantity is, reads the same."""
        return abs(number - self.value) <= self.margin


def quantity(text: str) -> Quantity:
    """Returns the first number of a text, with its unit (k, M, B, T or the word). Raises ValueError if there is none,
    or if it is not positive."""
    experts = re.search(r"(\d+)\s*[x×]\s*(\d+(?:\.\d+)?)\s*B(?![a-z])", text, re.IGNORECASE)
    if experts:  # 8x7B has 46.7 billion: experts share attention and embeddings
        value = int(experts[1]) * float(experts[2]) * 1e9
        return Quantity(value, 0.25 * value)
    found = _WITH_UNIT.search(text)
    if found is None or re.search(r"(?:^|\s)[-−]\s*$", text[: found.start()]):
        raise ValueError("expected a number above 0, such as 7B, 13e9 or 1,000,000")
    digits, unit = found[1].replace(",", ""), _UNITS.get((found[2] or "").lower(), 1.0)
    value = float(digits) * unit
    if not 0 < value < math.inf:
        raise ValueError("expected a number above 0")
    mantissa, _, exponent = digits.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    zeros = len(whole) - len(whole.rstrip("0")) if not decimals else -len(decimals)
    half_digit = 10.0 ** (int(exponent or 0) + zeros) * unit / 2
    is_rounded = unit > 1 or bool(exponent)
    return Quantity(value, min(max(0.005 * value, half_digit if is_rounded else 0.0), 0.075 * value))


def whole_number(text: str) -> int:
    """Returns the first number of a text, which must be whole: 64, 1,024, 2k (2000). Raises ValueError."""
    value = quantity(text).value
    if value != int(value):
        raise ValueError(f"expected a whole number; {math.floor(value)} or {math.ceil(value)} works")
    return int(value)


def length(text: str) -> int:
    """Returns a number of tokens in a row, where k stands for 1024: 8192, 8k (8192), 128k (131072)."""
    found = re.search(_NUMBER + r"\s*k(?![a-z0-9])", text, re.IGNORECASE)
    return round(float(found[1].replace(",", "")) * 1024) if found else whole_number(text)


def percentage(text: str) -> float:
    """Returns a fraction from 0 to 1 of a text such as 85%, 85 or 0.85. Raises ValueError."""
    value = quantity(text).value
    fraction = value / 100 if "%" in text or value > 1 else value
    if not 0 < fraction <= 1:
        raise ValueError("expected a percentage from 1% to 100%, such as 85%")
    return fraction


def switch(text: str) -> bool:
    """Returns whether a text begins with yes (true, on) or no (false, off). Raises ValueError."""
    word = re.match(r"[A-Za-z]+", text.strip())
    if word is None or word[0].lower() not in _SWITCHES:
        raise ValueError("expected yes or no")
    return _SWITCHES[word[0].lower()]


def short(value: float) -> str:
    """Returns a number with three digits and a unit: 7.24B, 2T, 350M."""
    rounded = float(f"{value:.3g}")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= size:
            return f"{rounded / size:.3g}{unit}" if rounded < 1000 * size else f"{rounded / size:.0f}{unit}"
    return f"{rounded:g}"
