"""Text that is difficult for tokenizers."""

from hypothesis import strategies as st

_QUOTES = ["'s", "'S", "'ll", "'LL", "'Re", "'ſ", "'", "''", " '", "'d9"]
_SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\u00a0", "\u2003", "\u200b", "\u3000", "\ufeff"]
_WORDS = ["0", "12", "1234567", "½", "Ⅷ", "٣", "x", "abc", "ÀÉ", "ß", "ſ", "ﬁ", "e\u0301", "你好", "한", "𝔘"]
_SIGNS = ["😀", "👩‍👩‍👧", ".", "!!", "__", "/", "//\n", "<|endoftext|>", "\U000e0041", "\U0010ffff"]

TRICKY = _QUOTES + _SPACES + _WORDS + _SIGNS
"""Contractions, all kinds of blanks and line ends, digits, letters of one to four bytes, combining marks, emoji."""

texts = st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=6)), max_size=30).map("".join)
"""Hypothesis strategy: random text with many of these strings."""
