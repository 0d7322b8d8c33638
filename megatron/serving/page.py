"""The page to talk to the model: one file without external resources."""

import base64
import hashlib
import re
from pathlib import Path

PAGE = (Path(__file__).parent / "page.html").read_bytes()
"""The page, UTF-8."""


def policy_of(page: bytes) -> str:
    """Returns the Content-Security-Policy of a page: only its own style and script, and requests to its own server."""
    hashes = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rb"<" + tag.encode() + rb">(.*?)</" + tag.encode() + rb">", page, re.S)
        )
        for tag in ("style", "script")
    }
    rules = ["default-src 'none'", f"style-src {hashes['style']}", f"script-src {hashes['script']}"]
    return "; ".join([*rules, "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"])


PAGE_POLICY = policy_of(PAGE)
