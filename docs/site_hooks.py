"""What `mkdocs build` cannot do alone: adds the README and a reference of the public names, and follows their links.

Links to files that are no pages, such as tests and programs, become the path in code letters.
"""

import contextlib
import importlib
import inspect
import json
import re
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
EXTRA = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the site that are not in docs/, with their files."""
NAMES = ROOT / "tests/data/megatron_lm_api.json"
OURS = {
    "megatron.training.providers": ("Providers", "Context", "Stage", "SampleCounts"),
    "megatron.training.hooks.hook": ("Hook",),
    "megatron.core.backends": ("Backend",),
    "megatron.training.trained_model": ("load_trained_model", "TrainedModel"),
}
"""Our own names that docs/api.md calls public."""
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for page, source in EXTRA.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for page, text in reference().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns the page with links that work on the site."""
    here = PurePosixPath(page.file.src_uri)
    generated = here.name in EXTRA and len(here.parts) == 1

    def follow(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, anchor = target.partition("#")[::2]
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        folder = ROOT if generated else (ROOT / "docs" / here).parent
        file = (folder / path).resolve()
        if not file.exists():
            return match[0]  # --strict reports it
        name = file.relative_to(ROOT).as_posix()
        to = {source: page for page, source in EXTRA.items()}.get(name, name.removeprefix("docs/"))
        if files.get_file_from_path(to) is None:
            return text if text.startswith("`") else f"{text} (`{name}`)"
        up = "../" * (len(here.parts) - 1)
        return f"[{text}]({up}{to}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(follow, markdown)


def reference() -> dict[str, str]:
    """Returns the pages of the reference by path: an overview, and a page for each module with public names."""
    names: dict[str, set[str]] = defaultdict(set)
    for entry in json.loads(NAMES.read_text("utf-8")):
        names[entry["module"]].add(entry["name"])
    for module, ours in OURS.items():
        names[module].update(ours)
    pages = {f"reference/{module}.md": _module_page(module, sorted(found)) for module, found in sorted(names.items())}
    lines = [
        f"- [{module}]({module}.md): {', '.join(f'`{name}`' for name in sorted(names[module]))}"
        for module in sorted(names)
    ]
    about = "Each page lists the public names of a module ([what is public](../api.md)), with signature and docstring."
    return {**pages, "reference/index.md": "\n".join(["# Reference of public names", "", about, "", *lines, ""])}


def _module_page(module: str, names: list[str]) -> str:
    found = importlib.import_module(module)
    about = inspect.cleandoc(found.__doc__ or "").partition("\n\n")[0]
    sections = [_section(name, getattr(found, name)) for name in names]
    return "\n\n".join([f"# {module}", _plain(about), *sections, ""])


def _section(name: str, thing: Any, level: int = 2) -> str:
    parts = [f"{'#' * level} {name}"]
    if callable(thing):
        with contextlib.suppress(TypeError, ValueError):
            parts.append(f"```python\n{name}{inspect.signature(thing)}\n```")
        parts.append(_plain(inspect.getdoc(thing) or ""))
    else:
        parts.append(f"A value: `{thing!r}`" if len(repr(thing)) < 200 else "A value.")
    if inspect.isclass(thing):
        methods = {key: value for key, value in vars(thing).items() if inspect.isfunction(value) and key[0] != "_"}
        parts += [_section(f"{name}.{key}", value, level + 1) for key, value in methods.items() if value.__doc__]
    return "\n\n".join(part for part in parts if part)


def _plain(text: str) -> str:
    """Returns a docstring as Markdown: blocks of code stay, brackets are no links."""
    return re.sub(r"\]\(", r"]\\(", text).replace("<", "&lt;")
