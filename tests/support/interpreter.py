"""Makes Triton's interpreter twice as fast: it gives the functions of `triton.language` their interpreted form
anew in each call of a function within a kernel, such as `tl.sum`. Here the launch of a kernel does so alone."""

import sys
from functools import cache
from typing import Any


def patch_once() -> None:
    """Changes the interpreter of this process if Triton is imported."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter._patch_lang, "once"):
        return
    patch, forms = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[int] = set()
    """Which of the two modules a launch in progress has patched."""

    @cache
    def modules_of(function: Any) -> frozenset[int]:
        return frozenset(id(form) for form in forms if any(value is form for value in function.__globals__.values()))

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def once(function: Any) -> Any:
        scope = Scope()
        if not modules_of(function) <= patched:
            scope._changes = patch(function)._changes
            patched.update(modules_of(function))
        return scope

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once
