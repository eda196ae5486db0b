#!/usr/bin/env bash
# Everything a change must pass: lint, format, types, tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
pyright
# With the slow tests. Compiling takes most of the time, and the tests of a file share what is compiled.
pytest -n 2 --dist loadfile -m "not aot and not exhaustive" "$@"
