"""Sequences of tokens as a grid: one a row, or several short ones one behind the other, and equal ones once.

A batch is as wide as its longest sequence; with lengths from 10 to 31 a third of it is padding. Packed, a row holds
several sequences. Positions start again at 0 with each, from which transformers' masks keep them apart.

A policy of low entropy gives the same response to a prompt many times. Its states are the same: they are computed once and
read by every copy, and the gradients of the copies add up there."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

PAYS = 0.9  # of the rows at most: the causal kernel needs no mask and is left only for a real gain
LONGEST = 256  # tokens; the mask that keeps packed sequences apart grows with the square of the row
_PROBED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Layout:
    """input_RS: token ids of R rows; position_RS: their positions (one row when all are alike); start_B: place of each
    sequence's first token in the flattened grid."""

    input_RS: torch.Tensor
    position_RS: torch.Tensor
    start_B: torch.Tensor


def arrange(sequences: Sequence[Sequence[int]], pad_id: int, *, pack: bool = False, share: bool = False) -> Layout:
    """The grid of the sequences.

    Args:
        sequences: token ids, none empty.
        pad_id: fills the rows up.
        pack: several sequences in a row, where that saves at least a tenth of the rows and the longest has at most 256 tokens.
        share: equal sequences once.
    """
    places: dict[object, int] = {}
    keys = [tuple(sequence) for sequence in sequences] if share else range(len(sequences))
    place_B = [places.setdefault(key, len(places)) for key in keys]
    different = list(dict(zip(keys, sequences, strict=True)).values())
    lengths = [len(sequence) for sequence in different]
    width = max(lengths)
    pack = pack and width <= LONGEST
    bins = first_fit(lengths, width) if pack else []
    if not pack or len(bins) > PAYS * len(different):
        bins = [[i] for i in range(len(different))]
    grid_RS = np.full((len(bins), width), pad_id, dtype=np.int64)
    position_RS = np.tile(np.arange(width), (len(bins), 1))
    start = np.zeros(len(different), dtype=np.int64)
    for row, members in enumerate(bins):
        at = 0
        for i in members:
            grid_RS[row, at : at + lengths[i]] = different[i]
            start[i] = row * width + at
            at += lengths[i]
            position_RS[row, at:] = np.arange(width - at)  # of the next sequence, or of padding, which nothing sees
    if len(bins) == len(different):
        position_RS = np.arange(width)[None]  # padding behind a single sequence may as well go on counting
    return Layout(torch.from_numpy(grid_RS), torch.from_numpy(position_RS), torch.from_numpy(start[place_B]))


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Indices in bins of at most ``width`` tokens: longest first, each into the fullest bin that has room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[i], -1))
        left, number = room.pop(place) if place < len(room) else (width, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(i)
        bisect.insort(room, (left - lengths[i], number))
    return bins


def can_pack(base_model: Any) -> bool:
    """Whether sequences that share a row stay apart in this model, found out once by a probe. CPU only.

    On a GPU the kernel that needs no mask is worth more than the padding."""
    device = next(base_model.parameters()).device
    if device.type != "cpu":
        return False
    if base_model not in _PROBED:
        _PROBED[base_model] = _probe(base_model)
    return _PROBED[base_model]


@torch.no_grad()
def _probe(model: Any) -> bool:
    was_training = model.training
    model.eval()
    try:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(9) % vocabulary
        parts = [ids[:5], ids[5:]]
        alone = [model(input_ids=p[None], position_ids=torch.arange(len(p))[None], use_cache=False)[0][0] for p in parts]
        positions = torch.cat([torch.arange(len(p)) for p in parts])[None]
        together = model(input_ids=ids[None], position_ids=positions, use_cache=False)[0][0]
    finally:
        model.train(was_training)
    gap = float((torch.cat(alone).double() - together.double()).abs().max())
    tolerance = 1e-4 if together.dtype in (torch.float32, torch.float64) else 2e-2
    return gap <= tolerance * max(1.0, float(together.double().square().mean().sqrt()))
