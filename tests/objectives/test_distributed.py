"""Two real processes (gloo): loss, gradient, choice of tokens and metrics equal those of one process, for every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from all_methods import NAMES, VARIANTS

from tepo_core.objectives.invariance import minibatch_gradient, random_batch, relative_error, with_selection
from tepo_core.objectives.methods import MiniBatchTotals, resolve
from tepo_core.objectives.metrics import merge

RANKS = 2
SHARES = [[0, 3, 4, 9], [1, 2, 5, 6, 7, 8, 10]]  # uneven on purpose: local means would differ


def one_rank(rank: int, folder: str) -> None:
    """Work through this rank's rows of every method's mini-batch and leave the results in ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    group, results = dist.group.WORLD, {}
    for name in NAMES:
        method = resolve(name, VARIANTS)
        mine = random_batch(method, responses=11, longest=60).rows(torch.tensor(SHARES[rank]))
        totals = MiniBatchTotals.from_mask(mine.mask_BT, constant=60.0, group=group)
        mine = with_selection(method, replace(mine, selected_BT=None), group=group)
        loss, gradients = minibatch_gradient(method, mine, totals=totals)
        metrics = merge([method.loss(mine, totals)], group)
        results[name] = {"totals": totals, "loss": loss, "gradients": gradients, "metrics": metrics}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(one_rank, args=(folder,), nprocs=RANKS)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_process(ranks, name):
    method = resolve(name, VARIANTS)
    batch = random_batch(method, responses=11, longest=60)
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=60.0)
    loss, gradients = minibatch_gradient(method, batch, totals=totals)
    parts = [rank[name] for rank in ranks]
    assert [part["totals"] for part in parts] == [totals] * RANKS
    assert sum(float(part["loss"]) for part in parts) == pytest.approx(float(loss), rel=1e-12, abs=1e-14)
    together = {field: torch.zeros_like(value) for field, value in gradients.items()}
    for part, rows in zip(parts, SHARES, strict=True):
        for field, value in part["gradients"].items():
            together[field][rows] = value
    assert relative_error(together, gradients) <= 1e-10
    sums, values = merge([method.loss(batch, totals)])
    for part in parts:
        found_sums, found_values = part["metrics"]
        assert found_values == pytest.approx(values, rel=1e-12, abs=1e-12)
        assert found_sums.keys() == sums.keys()
        for key, pair in sums.items():
            assert found_sums[key] == pytest.approx(pair, rel=1e-10, abs=1e-10), key
