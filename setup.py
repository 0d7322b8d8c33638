"""Adds to pyproject.toml what it cannot say: where tools/ is inside the wheel, and the commit that it is built from."""

import subprocess
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TOOLS = {"megatron.checkout.tools": "tools", "megatron.checkout.tools.checkpoint": "tools/checkpoint"}


class BuildWithCommit(build_py):
    """Writes the commit into the wheel, for --version. An editable installation asks git when it runs."""

    def run(self) -> None:
        """Copies the modules, then writes `megatron/commit.txt`. Without git the file is not written."""
        super().run()
        if self.editable_mode or not (ROOT / ".git").exists():
            return
        words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        try:
            commit = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return
        (Path(self.build_lib) / "megatron/commit.txt").write_text(commit, "utf-8")


setup(
    packages=[*find_namespace_packages(include=["megatron*"]), *TOOLS],
    package_dir=TOOLS,
    cmdclass={"build_py": BuildWithCommit},
)
