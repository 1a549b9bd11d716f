"""What the tests of the loop start from."""

from __future__ import annotations

import pytest
from tiny import tiny_study

from tepo_core.tasks.prepare import prepare
from tepo_core.training.warmup import warmup


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Prepared data and warmed-up policies of two seeds."""
    root = tmp_path_factory.mktemp("study")
    study = tiny_study(seeds=[0, 1])
    prepare(study, root)
    for seed in study.seeds:
        warmup(study, "facts", seed, root)
    return root
