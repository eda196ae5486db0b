#!/usr/bin/env bash
# Everything a change must pass: lint, format, types, tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
# Both workers and all subprocesses of the tests read the same modules, so each is compiled to bytecode once.
unset PYTHONDONTWRITEBYTECODE
# Types take minutes of one core. They are checked beside the tests, and reported after them.
types=$(mktemp)
pyright >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
status=0
# With the slow tests. Compiling takes most of the time, and the tests of a file share what is compiled. Tests of bits
# have steps compiled as for users, in a run of their own; `tests/compiler.py` has the options of the others.
for chosen in "bits" "not bits"; do
    pytest -n 2 --dist loadfile -m "$chosen and not aot and not exhaustive and not quiet" "$@" || {
        failed=$?
        [ "$failed" -eq 5 ] || status=$failed # 5: the arguments choose no test of this run
    }
done
wait "$checker" || { status=$?; echo "pyright fails:"; }
cat "$types"
exit "$status"
