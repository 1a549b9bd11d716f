#!/bin/sh
# Parity with verl and TRL, each in an environment of its own: tests/peers/run.sh [verl|trl ...] (both by default).
# The first call builds .venv-verl and .venv-trl; a changed requirements file builds them again.
set -eu
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- verl trl
for name in "$@"; do
    wanted="requirements/peers-$name.txt"
    [ -f "$wanted" ] || { echo "unknown peer '$name'; allowed: verl, trl" >&2; exit 2; }
    folder=".venv-$name"
    if ! cmp -s "$wanted" "$folder/built-from.txt"; then
        rm -rf "$folder"
        "${PYTHON:-python3}" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --requirement "$wanted"
        cp "$wanted" "$folder/built-from.txt"
    fi
    echo "== parity with $name"
    PYTHONPATH=.:tests/support:tests/peers "$folder/bin/python" -m pytest --import-mode=importlib -m peers "tests/peers/test_$name.py"
done
