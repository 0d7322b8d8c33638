"""--version: the versions that a report of a problem needs."""

import platform
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import torch

from megatron.core.utils.versions import MEGATRON_LM_RELEASE

_DISTRIBUTION = "megatron-pretraining"
_ROOT = Path(__file__).resolve().parents[3]


def version_text() -> str:
    """Returns the versions of this program, with the commit of the checkout or of the wheel, of torch and of Python,
    and the release of Megatron-LM whose names it has."""
    commit = _commit()
    return (
        f"{_version()}{f' (commit {commit})' if commit else ''}, names of Megatron-LM {MEGATRON_LM_RELEASE}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _version() -> str:
    project = _ROOT / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text("utf-8"))["project"]["version"])
    return metadata.version(_DISTRIBUTION)


def _commit() -> str | None:
    """Returns the commit of the checkout, or of the one that the wheel was built from, with + after it if files differ
    from it; None without either."""
    recorded = _ROOT / "megatron/commit.txt"  # setup.py writes it
    if recorded.is_file():
        return recorded.read_text("utf-8").strip()
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
