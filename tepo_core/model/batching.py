"""Rows grouped by length, so that padding is small. Grouping decides memory and speed, never a result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions grouped so that rows x longest <= budget tokens (a longer single row gets a batch of its own), sorted by length."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    groups: list[list[int]] = []
    for position in order:
        if groups and (len(groups[-1]) + 1) * max(lengths[position], 1) <= budget:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def length_parts(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """``rows`` in at most ``parts`` shares of like length and nearly equal size."""
    order = sorted(range(len(rows)), key=lambda i: (lengths[i], i))
    return [[rows[i] for i in share] for share in np.array_split(order, parts) if len(share)]
