"""Connections to object stores (s3://, gs://, memory://, ...) through the package fsspec."""

import os
import re
import typing

from megatron.core.exceptions import UserError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


Store = typing.Any
"""A file system of fsspec, which has no types."""


class StoreError(UserError):
    """A store does not answer or refuses access. Unlike a missing object, this may be temporary."""


_opened: dict[tuple[int, str], object] = {}
"""File systems by process id and scheme: connections do not survive a fork."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names an object in a store, such as gs://bucket/key."""
    return _SCHEME.match(os.fspath(path)) is not None


def file_system(url: str) -> Store:
    """Returns the fsspec file system of a URL. Raises UserError, naming the package, if one is missing."""
    scheme = url.partition("://")[0].lower()
    key = os.getpid(), scheme
    if key not in _opened:
        try:
            import fsspec

            _opened[key] = fsspec.filesystem(scheme, skip_instance_cache=True)
        except ImportError as error:
            raise UserError(
                f"{url}: reading {scheme}:// needs a package that is not installed ({error}); install it, or copy or "
                "mount the files"
            ) from error
        except ValueError as error:
            raise UserError(f"{url}: {scheme}:// is no kind of store that fsspec knows ({error})") from error
    return _opened[key]
