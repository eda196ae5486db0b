"""A digest of the source that a compiled function is made of: the files that its module reaches through imports.

A change elsewhere, as in the server, leaves the compiled steps on disk valid.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jaxinfer", "kernels_pallas")
# One import statement of these packages, inside functions too. A parser of Python takes 30 times as long.
_NAMES = r"\([^)]*\)|[^\n]*"
_IMPORT = re.compile(rf"^[ ]*(?:from ((?:{'|'.join(PACKAGES)})\b[\w.]*) import ({_NAMES})|import ({_NAMES}))", re.M)
_TYPES_ONLY = re.compile(r"^( *)if TYPE_CHECKING:\n(?:\1 +[^\n]*\n|\n)+", re.M)


def source_digest(function: Any, args: Iterable[Any], statics: Iterable[Any], *, compiler: str) -> str:
    """Returns a digest of the source that traces a function of these packages with some arguments.

    It covers the modules of the function, of its static arguments and of the types in the pytrees `args`, the module
    `compiler`, all modules that these import, and the tuned block sizes. A package's `__init__` counts only for a
    module that imports from it. For a function from elsewhere it covers both packages whole, since nothing shows its
    own imports.
    """
    if _path(function.__module__) is None:
        return _digest(frozenset(_all_modules()))
    values = [function, *_parts_of(statics)]
    types = [function, *_node_types(jax.tree.structure(tuple(args)))]
    names = {getattr(value, "__module__", None) or type(value).__module__ for value in [*values, *types]}
    return _digest(frozenset({compiler, *names}))


@functools.cache
def _digest(names: frozenset[str]) -> str:
    digest = blake2b(digest_size=20)
    for name in sorted(reachable(names)):
        digest.update(f"{name} ".encode() + _read(name).encode())
    for path in sorted(_root("kernels_pallas").rglob("tuned/*.json")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def reachable(names: Iterable[str]) -> set[str]:
    """Returns the modules with source that the named ones import, directly or not, and themselves."""
    found, left = set[str](), set(names)
    while left:
        name = left.pop()
        if _path(name) is not None:
            found.add(name)
            left |= imports_of(name) - found
    return found


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    """Returns the modules of these packages that a module imports; those for the type checker alone do not count."""
    imported = set[str]()
    for module, names, plain in _IMPORT.findall(_TYPES_ONLY.sub("", _read(name))):
        if module:
            of_names = {f"{module}.{each}" for each in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#[^\n]*", "", names))}
            imported |= {module, *(each for each in of_names if _path(each) is not None)}
        else:
            imported |= {each for each in re.findall(r"[\w.]+", plain) if each.startswith(PACKAGES)}
    return frozenset(each for each in imported if _path(each) is not None)


@functools.cache
def _read(name: str) -> str:
    path = _path(name)
    return "" if path is None else path.read_text()


@functools.cache
def _path(name: str) -> Path | None:
    """Returns the source file of a module of these packages; None for any other name."""
    package, *inner = name.split(".")
    if package not in PACKAGES:
        return None
    path = _root(package).joinpath(*inner)
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((each for each in candidates if each.is_file()), None)


def _all_modules() -> Iterator[str]:
    for package in PACKAGES:
        for path in _root(package).rglob("*.py"):
            *parts, last = path.relative_to(_root(package)).with_suffix("").parts
            yield ".".join([package, *parts, *([] if last == "__init__" else [last])])


@functools.cache
def _root(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _parts_of(values: Iterable[Any]) -> Iterator[Any]:
    """Yields static values and all that they hold."""
    for value in values:
        yield value
        if is_dataclass(value):
            yield from _parts_of(getattr(value, field.name) for field in fields(value))
        elif isinstance(value, dict):
            yield from _parts_of([*value.keys(), *value.values()])
        elif isinstance(value, tuple | list | frozenset):
            yield from _parts_of(value)


def _node_types(structure: Any) -> set[type]:
    """Returns the types of the inner nodes of a pytree."""
    found, left = set[type](), [structure]
    while left:
        node = left.pop()
        if (data := node.node_data()) is not None:
            found.add(data[0])
        left += node.children()
    return found
