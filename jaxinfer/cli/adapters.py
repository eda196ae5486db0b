"""`--adapter`: LoRA adapters that a command loads beside the model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping


def add_option(group: argparse._ArgumentGroup, *, takes_one: bool) -> None:
    """Adds the option; a command for one request takes one adapter."""
    use = "" if takes_one else ", for requests that name it; may be repeated"
    help_text = f"LoRA adapter that PEFT has saved{use}"
    group.add_argument("--adapter", action="append", metavar="NAME=PATH", help=help_text)
    group.set_defaults(takes_one_adapter=takes_one)


def read_option(arguments: argparse.Namespace) -> Mapping[str, str]:
    """Returns the folder or id of each adapter by name, and gives the engine slots for them if nothing else is said.

    Raises ValueError for another form, a repeated name, or several adapters for one request.
    """
    adapters: dict[str, str] = {}
    for text in getattr(arguments, "adapter", None) or ():
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(f"--adapter {text}: give a name and a folder or id, as in NAME=PATH")
        if name in adapters:
            raise ValueError(f"--adapter {text}: the name {name!r} is given twice; give each adapter its own")
        adapters[name] = path
    if len(adapters) > 1 and arguments.takes_one_adapter:
        raise ValueError(f"--adapter is given {len(adapters)} times, and this command computes one request; give one")
    if adapters:
        vars(arguments).setdefault("max_adapters", len(adapters))
    return adapters
