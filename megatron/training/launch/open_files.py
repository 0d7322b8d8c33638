"""Lets a process of a run open as many files as the system allows."""

import contextlib
import resource

_MOST = 1 << 16
"""Highest limit that is asked for: some programs walk through all numbers up to the limit."""


def raise_open_file_limit() -> None:
    """Raises this process's soft limit of open files (ulimit -n) to the hard one, up to 65536. Child processes inherit
    it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some containers and macOS refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
