"""Writes containers/constraints.txt: the version of every package that an image installs, as this environment has it.

    python containers/pins.py

Run it where `make test` passes; the images and `make sbom` then use the versions that were tested.
"""

import re
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PROJECT, EXTRAS = "megatron-pretraining", ("training", "hf", "sft", "parquet")
HEAD = (
    "# Written by containers/pins.py: versions that were tested together. pip install --constraint reads this file.\n"
)


def needed(name: str, extras: tuple[str, ...], found: dict[str, str]) -> dict[str, str]:
    """Adds the packages that a package needs, directly or not, to `found`: version by name."""
    for requirement in metadata.requires(name) or ():
        wanted, _, marker = requirement.partition(";")
        match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", wanted)
        assert match is not None
        other = re.sub(r"[-_.]+", "-", match[1]).lower()
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)""", marker)
        if (extra is not None and extra[1] not in extras) or other in found or other == PROJECT:
            continue
        try:
            version = metadata.version(other)
        except metadata.PackageNotFoundError:  # of another system
            continue
        found[other] = version.partition("+")[0]
        needed(other, tuple((match[2] or "").split(",")), found)
    return found


def main() -> None:
    """Writes the file."""
    found = needed(PROJECT, EXTRAS, {})
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
    (FOLDER / "constraints.txt").write_text(HEAD + "".join(lines), "utf-8")


if __name__ == "__main__":
    main()
