"""Multi-token-prediction (MTP) modules: what the policy thinks of o_t+1 ... o_t+K-1 before it has seen o_t.

MPO (arXiv 2602.14386) takes log pi(o_t+n | o_<t), n = 1..K-1, from such modules; the backbone itself gives n = 0. Their inner
shape is not known to us. Here module n is a residual block on the backbone's last hidden state (RMSNorm, SiLU, two matrices)
followed by the policy's own output matrix, as in parallel multi-token heads (arXiv 2404.19737). A fresh module is the identity,
so it starts from the backbone's distribution. The modules live at ``model.mtp``: the optimiser, checkpoints and copies
of the policy carry them along.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tepo_core.config import ConfigError
from tepo_core.model.logprobs import ResponseStates, chosen_logprobs, output_matrix, response_states, state_logprobs
from tepo_core.seeding import derive_seed

FOLDER = "mtp"  # below the policy's own: engines that read every *.safetensors of a policy must not find these


class MTPModules(nn.Module):
    """K - 1 parallel residual blocks. Parameters a module: 2 * hidden * inner + hidden."""

    def __init__(self, modules: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = {"modules": modules, "hidden": hidden, "inner": inner}
        self.norm = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6, dtype=dtype) for _ in range(modules))
        self.up = nn.ModuleList(nn.Linear(hidden, inner, bias=False, dtype=dtype) for _ in range(modules))
        self.down = nn.ModuleList(nn.Linear(inner, hidden, bias=False, dtype=dtype) for _ in range(modules))
        for layer in self.down:
            nn.init.zeros_(layer.weight)

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, hidden_ND: Tensor, n: int) -> Tensor:
        """State that predicts the n-th token after the next one, n = 1..K-1."""
        index = n - 1
        return hidden_ND + self.down[index](nn.functional.silu(self.up[index](self.norm[index](hidden_ND))))


def add_modules(model: nn.Module, modules: int, *, seed: int, inner: int | None = None) -> None:
    """Attach ``modules`` fresh modules at ``model.mtp``; weights depend on the seed alone. inner: default hidden.

    Raises :class:`ConfigError` for fewer than one module or a model that has some already."""
    if modules < 1:
        raise ConfigError(f"policy.mtp_modules = {modules}; allowed: K - 1 >= 1 modules for blocks of K tokens")
    if modules_of(model) is not None:
        raise ConfigError(f"the policy has {len(model.mtp)} MTP modules already; load it without adding any")
    weight_VD, _ = output_matrix(model)
    hidden = weight_VD.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "mtp"))
        fresh = MTPModules(modules, hidden, inner or hidden, weight_VD.dtype)
    model.mtp = fresh.to(weight_VD.device)


def modules_of(model: nn.Module) -> MTPModules | None:
    """The policy's modules, or None."""
    return getattr(model, "mtp", None)


def ahead_logprobs(model: nn.Module, states: ResponseStates, modules: int, *, temperature: float) -> Tensor:
    """log pi(o_t+n | o_<t), [B, T, modules], entry n - 1 for n = 1..modules; 0 where token t + n does not exist.

    ``states`` comes from :func:`tepo_core.model.logprobs.response_states`. Differentiable in the backbone and the modules.
    Raises :class:`ConfigError` when the policy has fewer modules."""
    have = modules_of(model)
    if have is None or len(have) < modules:
        raise ConfigError(
            f"the method needs {modules} MTP modules (block.size - 1), the policy has {len(have) if have else 0}; set "
            f"policy.mtp_modules: {modules} and run the warm-up again, or use block.logprobs: backbone"
        )
    weight_VD, bias = output_matrix(model)
    return _ahead(have, states.hidden_ND, states, weight_VD=weight_VD, bias=bias, modules=modules, temperature=temperature)


def logprobs_and_ahead(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    modules: int,
    *,
    pad_id: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`tepo_core.model.logprobs.sequence_logprobs` and :func:`ahead_logprobs` from one pass through the backbone.

    Returns (logprobs_BT, entropy_BT, mask_BT, ahead_logprobs_BTK)."""
    states = response_states(model, prompt_ids, response_ids, pad_id=pad_id)
    logprobs_BT, entropy_BT = state_logprobs(model, states, temperature=temperature)
    ahead_BTK = ahead_logprobs(model, states, modules, temperature=temperature)
    return logprobs_BT, entropy_BT, states.mask_BT, ahead_BTK


def _ahead(
    have: MTPModules,
    hidden_ND: Tensor,
    states: ResponseStates,
    *,
    weight_VD: Tensor,
    bias: Tensor | None,
    modules: int,
    temperature: float,
) -> Tensor:
    targets_BT, mask_BT = states.grid(states.targets_N), states.mask_BT
    columns = []
    for n in range(1, modules + 1):
        exists_BT, ahead_BT = _shift(mask_BT, n), _shift(targets_BT, n)
        hidden_MD = have(hidden_ND[exists_BT[mask_BT]].to(weight_VD.dtype), n)
        logprobs_M, _ = chosen_logprobs(
            hidden_MD, weight_VD, ahead_BT[exists_BT], temperature=temperature, entropy=False, bias=bias
        )
        columns.append(logprobs_M.new_zeros(mask_BT.shape).masked_scatter(exists_BT, logprobs_M))
    return torch.stack(columns, dim=-1)


def _shift(values_BT: Tensor, n: int) -> Tensor:
    """values[t + n], False or 0 beyond the end."""
    return nn.functional.pad(values_BT[:, n:], (0, min(n, values_BT.shape[1])))


def ahead_loss(model: nn.Module, states: ResponseStates) -> tuple[Tensor, Tensor]:
    """Warm-up loss of the modules: mean cross-entropy of o_t+n over all modules and tokens that exist, and their number.

    It moves the modules alone (states and output matrix are detached): the backbone of a policy warmed up with modules is
    the one warmed up without, and MPO starts from the same policy as every other method."""
    have = modules_of(model)
    weight_VD, bias = output_matrix(model)
    bias = None if bias is None else bias.detach()
    logprobs_BTK = _ahead(
        have, states.hidden_ND.detach(), states, weight_VD=weight_VD.detach(), bias=bias, modules=len(have), temperature=1.0
    )
    lengths_B1 = states.mask_BT.sum(-1, keepdim=True)
    tokens = (lengths_B1 - torch.arange(1, len(have) + 1, device=lengths_B1.device)).clamp(min=0).sum()
    return -logprobs_BTK.sum() / tokens.clamp(min=1), tokens


def save_modules(model: nn.Module, folder: Path) -> None:
    """Write the modules, if any, to ``folder/mtp``."""
    if (have := modules_of(model)) is not None:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        save_file(have.state_dict(), folder / FOLDER / "modules.safetensors")
        (folder / FOLDER / "config.json").write_text(json.dumps(have.shape, sort_keys=True) + "\n", encoding="utf-8")


def load_modules(model: nn.Module, folder: Path) -> None:
    """Attach the modules that ``folder/mtp`` holds; nothing where there is no such folder."""
    if (folder / FOLDER).is_dir():
        shape = json.loads((folder / FOLDER / "config.json").read_text(encoding="utf-8"))
        weight_VD, _ = output_matrix(model)
        have = MTPModules(**shape, dtype=weight_VD.dtype)
        have.load_state_dict(load_file(folder / FOLDER / "modules.safetensors"))
        model.mtp = have.to(weight_VD.device)


def backbone_state(model: nn.Module) -> dict[str, Tensor]:
    """The policy's weights without the modules: what ``save_pretrained`` and other engines get."""
    return {name: value for name, value in model.state_dict().items() if not name.startswith(f"{FOLDER}.")}
