"""One derived seed per (run, purpose, step, prompt, sample), so that no random state has to be carried or saved.

Seeds are hashes of their labels: adding a new purpose or changing the order of calls never shifts another stream.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(*labels: str | int) -> int:
    """63-bit seed from labels such as ``(run_seed, "sample", step, prompt, sample)``. Equal labels, equal seed."""
    text = "\x1f".join(f"{type(label).__name__}:{label}" for label in labels)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def numpy_generator(*labels: str | int) -> np.random.Generator:
    """Counter-based NumPy generator for the labels."""
    return np.random.Generator(np.random.Philox(key=derive_seed(*labels)))


def torch_generator(*labels: str | int, device: str = "cpu") -> torch.Generator:
    """Torch generator for the labels."""
    return torch.Generator(device=device).manual_seed(derive_seed(*labels))


def epoch_rows(position: int, size: int, available: int, *labels: str | int) -> list[int]:
    """Rows ``position .. position + size`` of an endless stream over ``available`` rows, freshly permuted every epoch.

    The stream depends on the labels alone, so a position is all that has to be saved to continue it."""
    rows: list[int] = []
    while len(rows) < size:
        epoch, offset = divmod(position + len(rows), available)
        order = numpy_generator(*labels, "epoch", epoch).permutation(available)
        rows.extend(int(row) for row in order[offset : offset + size - len(rows)])
    return rows
