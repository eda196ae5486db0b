"""An extension of griffe: the comments of fields and of names in modules become a part of their descriptions."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

COMMENT = re.compile(r"^\s*# ?(.*)$")
TITLE = "Fields:"


def comment_of(field: griffe.Attribute, lines: list[str]) -> str:
    """Returns the comment behind a field or name, or those in the lines right above it; "" without one."""
    assert field.lineno is not None
    assert field.endlineno is not None
    _, mark, behind = lines[field.endlineno - 1].partition("  # ")
    if mark:
        return behind.strip()
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if (found := COMMENT.match(line)) is None:
            break
        above.insert(0, found[1])
    return " ".join(above)


class FieldComments(griffe.Extension):
    """Describes the fields of dataclasses and named tuples by their comments, unless the docstring names them."""

    def on_class_members(self, *, node: ast.AST | griffe.ObjectNode, cls: griffe.Class, **_: Any) -> None:
        """Adds the list of a class whose fields have comments."""
        if not isinstance(node, ast.ClassDef) or cls.docstring is None:
            return
        assert isinstance(cls.filepath, Path)
        lines, text = cls.filepath.read_text(encoding="utf-8").splitlines(), cls.docstring.value
        items = []
        for name, field in cls.attributes.items():
            if field.filepath != cls.filepath:  # one of a class in another file
                continue
            is_field = "property" not in field.labels and field.annotation is not None and not name.startswith("_")
            if is_field and f"`{name}`:" not in text and (comment := comment_of(field, lines)):
                items.append(f"* `{name}`: {comment}{'' if comment.endswith('.') else '.'}")
        if items:
            cls.docstring.value = "\n\n".join((text, TITLE, "\n".join(items)))

    def on_module_members(self, *, node: ast.AST | griffe.ObjectNode, mod: griffe.Module, **_: Any) -> None:
        """Describes the names of a module, such as types, by their comments."""
        if not isinstance(node, ast.Module) or not isinstance(mod.filepath, Path):
            return
        lines = mod.filepath.read_text(encoding="utf-8").splitlines()
        for name in mod.attributes.values():
            if name.is_alias or name.docstring is not None or name.lineno is None:
                continue
            if comment := comment_of(name, lines):
                name.docstring = griffe.Docstring(comment, lineno=name.lineno, parent=name)
