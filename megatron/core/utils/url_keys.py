"""Hides keys and passwords in URLs, which messages, logs and checkpoints would show to others."""

import re

_USER_INFO = re.compile(r"\b([a-z][a-z0-9+.-]+:/{1,2})(?:[^\s/@:'\"]*:(?!\d+/)[^\s@'\"]*|[^\s/@:'\"]+)@", re.IGNORECASE)
"""`key:secret@` or `token@` behind `s3://`, or behind `s3:/`, as a Path writes it. A secret may contain slashes; a port
and a path are none."""

_PARAMETER = re.compile(
    r"(?<=[?&;])([^=&#\s'\"]*(?:sig|signature|token|secret|password|passwd|credential|key|keyid)=)[^&#\s'\"]+",
    re.IGNORECASE,
)
"""A parameter such as `sig=...` of a URL that was signed."""


def hide_keys(text: str) -> str:
    """Returns the text with `***` in place of the keys of all URLs in it."""
    return _PARAMETER.sub(r"\1***", _USER_INFO.sub(r"\1***@", text)) if ":/" in text else text
