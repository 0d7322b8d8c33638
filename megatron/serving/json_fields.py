"""Reads the fields of a JSON object, with one clear error for a wrong one."""

import json
import math
from collections.abc import Collection

from megatron.serving.http_server import HttpError


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """Returns the error of a request whose field `param` is wrong."""
    return HttpError(400, message, param=param, code=code)


class JsonFields:
    """The fields of a request. A field of value null counts as missing. `finish` refuses fields that were not read."""

    def __init__(self, body: bytes) -> None:
        try:
            text = body.decode("utf-8")
            value = json.loads(text, parse_constant=_refuse_constant)
            if "\\u" in text:
                json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise bad_request(
                f"\\u{ord(error.object[error.start]):x} is half of a surrogate pair, no character"
            ) from None
        except UnicodeDecodeError as error:
            raise bad_request(f"the body is not UTF-8: byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not JSON: {str(error) or 'nested too deeply'}") from None
        if not isinstance(value, dict):
            raise bad_request("the body is not a JSON object")
        self._fields: dict[str, object] = {name: each for name, each in value.items() if each is not None}
        self._unread = set(self._fields)

    def value(self, name: str) -> object:
        """Returns the value of a field, or None."""
        self._unread.discard(name)
        return self._fields.get(name)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """Returns a whole number."""
        found = self.value(name)
        if found is None:
            return default
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise bad_request(f"{name} must be a whole number from {least} to {most}, not {_short(found)}", name)
        return found

    def number(self, name: str, default: float, least: float, most: float = math.inf) -> float:
        """Returns a number."""
        found = self.value(name)
        if found is None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool) or not least <= found <= most:
            limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise bad_request(f"{name} must be a number {limits}, not {_short(found)}", name)
        return float(found)

    def switch(self, name: str) -> bool:
        """Returns a boolean; missing: false."""
        found = self.value(name)
        if found is not None and not isinstance(found, bool):
            raise bad_request(f"{name} must be true or false, not {_short(found)}", name)
        return bool(found)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Returns a text, or a list of at most so many, none of them empty."""
        found = self.value(name)
        items = [] if found is None else found if isinstance(found, list) else [found]
        if len(items) > most or not all(isinstance(item, str) and item for item in items):
            raise bad_request(f"{name} must be a text or a list of at most {most}, none of them empty", name)
        return tuple(str(item) for item in items)

    def ignore(self, names: Collection[str]) -> None:
        """Reads fields that change nothing here."""
        self._unread -= set(names)

    def only(self, name: str, allowed: object, why: str) -> None:
        """Refuses a field unless it has the one value that works."""
        found = self.value(name)
        if found is not None and found != allowed:
            raise bad_request(f"{name} {_short(found)}: {why}", name, "unsupported_value")

    def finish(self) -> None:
        """Refuses fields that were not read."""
        if self._unread:
            names = ", ".join(sorted(self._unread)[:10])
            raise bad_request(
                f"unknown fields: {names[:200]}; docs/serving.md lists those that work", min(self._unread)
            )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
