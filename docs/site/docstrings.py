"""Docstrings as Markdown: names of the reference become links, examples become code."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from griffe import Alias, Attribute, Docstring, Extension, Module, Object

PAGES = Path(__file__).parents[1] / "api"
ROLE = re.compile(r":(?P<role>class|func|meth|attr|mod|exc|data):`~?(?P<name>[^`]+)`")
EXAMPLE = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*\S.*\n?)*)", re.MULTILINE)


def documented() -> dict[str, str]:
    """Where each name of the reference is documented, by its last part."""
    pages = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    return {path.rpartition(".")[2]: path for path in re.findall(r"^::: (\S+)", pages, re.MULTILINE)}


class Docstrings(Extension):
    """Makes Markdown of every docstring that griffe has read."""

    def __init__(self) -> None:
        super().__init__()
        self._paths = documented()

    def on_object(self, *, obj: Object, **_: Any) -> None:
        is_global = isinstance(obj, Attribute) and isinstance(obj.parent, Module)
        if obj.docstring is None and is_global and obj.name in self._paths:
            # A hook is an object that was made by a call, and its documentation with it.
            value = getattr(import_module(obj.module.path), obj.name)
            obj.docstring = Docstring(value.__doc__ or "", parent=obj, parser="google")
        if obj.docstring is not None:
            obj.docstring.value = self.markdown(obj.docstring.value)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Names that ``overlap`` finds in its packages when they are used: griffe does not run ``__getattr__``."""
        if pkg.path != "overlap":
            return
        for part in import_module("overlap")._PARTS:
            for name in import_module(f"overlap.{part}").__all__:
                target = f"overlap.{part}.{name}"
                if target in sys.modules:  # A module of the same name, which griffe would take for it.
                    target = f"{target}.{name}"
                elif name in pkg.members:
                    continue
                pkg.set_member(name, Alias(name, target))

    def markdown(self, text: str) -> str:
        """``text``, reStructuredText as far as these docstrings use it, as Markdown."""
        text = ROLE.sub(self._link, text)
        text = re.sub(r"^[ \t]*::[ \t]*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"::[ \t]*$", ":", text, flags=re.MULTILINE)
        return EXAMPLE.sub(_fenced, text)

    def _link(self, match: re.Match[str]) -> str:
        name, role = match["name"], match["role"]
        shown = f"`{name.rpartition('.')[2]}{'()' if role == 'meth' else ''}`"
        path = self._paths.get(name.rpartition(".")[2]) if role != "meth" else None
        return f"[{shown}][{path}]" if path else shown


def _fenced(match: re.Match[str]) -> str:
    code = match[0].rstrip("\n")
    indent = re.match(r"[ \t]*", code)
    space = indent[0] if indent else ""
    return f"{space}```pycon\n{code}\n{space}```\n"
