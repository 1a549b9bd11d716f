"""Shared set-up: few threads, fixed seeds, nothing of the user's own settings."""

from __future__ import annotations

import os

# Before torch is imported: two cores are often shared with other work, and more threads than cores make every test slower.
# 'make test' runs a process a core, each with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import random
import sys

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts from the same random state, whichever tests ran before it."""
    monkeypatch.delenv("TEPO_PROGRESS", raising=False)
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # a test that needs no torch shall not pay for its import
        import torch

        torch.set_num_threads(min(int(os.environ["MKL_NUM_THREADS"]), torch.get_num_threads()))
        torch.manual_seed(0)


LONGEST = tuple(f"test_{name}.py" for name in ["repro", "trainer", "host", "runner", "analysis", "update", "optimizers"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, so that no core is left alone with one of them at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
