"""One small mini-batch whose losses are worked out by hand."""

from __future__ import annotations

import torch

from tepo_core.objectives.methods import MiniBatchTotals

OLD = torch.tensor([[0.4, 0.8], [0.5, 1.0]], dtype=torch.float64).log()
NEW = torch.tensor([[0.6, 0.4], [0.35, 1.0]], dtype=torch.float64).log()
MASK = torch.tensor([[True, True], [True, False]])
ADVANTAGES = torch.tensor([[1.0, 1.0], [-2.0, -2.0]], dtype=torch.float64)
SELECTED = torch.tensor([[True, False], [False, False]])
ENTROPY = torch.tensor([[0.3, 0.9], [0.2, 0.0]], dtype=torch.float64)
OLD_ENTROPY = torch.tensor([[0.5, 0.7], [0.6, 0.0]], dtype=torch.float64)
TOTALS = MiniBatchTotals(tokens=3, responses=2, constant=4)
