"""The notebooks of scripts/notebooks, read and executed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "scripts" / "notebooks").glob("*.ipynb"))
SECONDS = 600  # for a cell that hangs


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


class Executed:
    """A notebook after its last cell, with the values of some Python expressions in its kernel.

    The notebook runs in `folder`, by another `python` if one is given; else with the package of the clone.
    """

    def __init__(self, path: Path, folder: Path, expressions: dict[str, str], python: Path | None = None) -> None:
        self._notebook = read(path)
        self._notebook.cells.append(nbformat.v4.new_code_cell(_print_as_json(expressions)))
        client = nbclient.NotebookClient(self._notebook, timeout=SECONDS, kernel_name="python3")
        # What the notebook writes is gone with the folder of the test.
        variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        if python is not None:
            client.create_kernel_manager().kernel_spec.argv[0] = str(python)  # pyright: ignore[reportOptionalMemberAccess]
            variables |= {"PYTHONPATH": "", "PIP_NO_INDEX": "1"}
        client.execute(cwd=str(folder), env=os.environ | variables)
        self._values: dict[str, Any] = json.loads(self.text().splitlines()[-1])

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def text(self) -> str:
        """Returns all that the cells have printed."""
        return "".join(output.text for output in self._outputs() if output.get("name") == "stdout")

    def shown(self, kind: str) -> list[str]:
        """Returns what the cells have shown, in a MIME type."""
        return [output.data[kind] for output in self._outputs() if kind in output.get("data", {})]

    def _outputs(self) -> list[nbformat.NotebookNode]:
        return [output for cell in code_cells(self._notebook) for output in cell.outputs]


def _print_as_json(expressions: dict[str, str]) -> str:
    items = ", ".join(f"{name!r}: {expression}" for name, expression in expressions.items())
    return f"import json\nprint()\nprint(json.dumps({{{items}}}))"
