import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm_python():
    """The interpreter that has vLLM. Without one these tests fail: they are only run when asked for."""
    default = ROOT / ".venv-vllm" / "bin" / "python"
    python = os.environ.get("TEPO_VLLM_PYTHON") or (str(default) if default.exists() else None)
    if python is None:
        pytest.fail("no environment with vLLM: run tests/vllm/run.sh, or set TEPO_VLLM_PYTHON to an interpreter that has it")
    return python
