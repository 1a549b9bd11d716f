"""The documents about objectives say what the code does: equations, coverage, and the worked example, executed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tepo_core.analysis.figures.objectives import gradient_weight, method_table
from tepo_core.config import ConfigError
from tepo_core.objectives.invariance import micro_batch_error, random_batch
from tepo_core.objectives.methods import PRESETS, MiniBatchTotals, resolve

DOCS = Path(__file__).parents[2] / "docs"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def example():
    """The page's method, registered as if its code stood in a file of the methods; forgotten afterwards."""
    page = (DOCS / "adding_a_method.md").read_text()
    (code,), (settings,) = blocks(page, "python"), blocks(page, "yaml")
    exec(
        compile(code, "docs/adding_a_method.md", "exec", dont_inherit=True),
        {"__name__": "tepo_core.objectives.methods.smooth_grpo"},
    )
    yield page, code, YAML(typ="safe").load(settings)
    PRESETS.pop("smooth_grpo", None)


def test_the_example_is_short_and_everything_follows_by_itself(example):
    page, code, settings = example
    assert len(code.strip().splitlines()) < 35
    variants = settings["variants"]
    for name in settings["methods"]:
        method = resolve(name, variants)
        assert micro_batch_error(method, 2, responses=9, longest=20) <= 1e-10
        batch = random_batch(method, responses=4, longest=9)
        method.validate(batch)
        out = method.loss(batch, MiniBatchTotals.from_mask(batch.mask_BT))
        assert (out.sums["mask"][0] > 0) == (name == "smooth_tepo")
    assert resolve("smooth_wide", variants).options["width"] == 0.5
    assert method_table(["smooth_grpo"]).loc["smooth_grpo", "status"] == "own"


def test_the_example_has_the_gradient_its_equation_has(example):
    """d/dr (1 + w tanh((r - 1) / w)) = 1 - tanh^2, times r for the log: 1 at d = 0, falling on both sides."""
    import torch

    d = torch.tensor([-0.3, 0.0, 0.3], dtype=torch.float64)
    expected = d.exp() * (1 - torch.tanh((d.exp() - 1) / 0.2).square())
    assert gradient_weight(resolve("smooth_grpo"), d, 1.0, whole=False).tolist() == pytest.approx(expected.tolist())


def test_the_example_refuses_what_the_page_says(example):
    page, _, _ = example
    with pytest.raises(ConfigError) as error:
        resolve("x", {"x": {"preset": "smooth_grpo", "clip": [0.2, 0.2]}})
    quoted = re.search(r"`(variants\.x: smooth_grpo does not use option 'clip'; it uses: advantage), \.\.\.`", page)
    assert str(error.value).startswith(quoted.group(1))
    with pytest.raises(ConfigError, match=r"width = -1"):
        resolve("x", {"x": {"preset": "smooth_grpo", "width": -1}})


def test_equations_and_presets_of_the_page_on_objectives_are_those_of_the_code():
    page = (DOCS / "objectives.md").read_text()
    for name, preset in PRESETS.items():
        if preset.status == "own":
            continue
        section = re.search(rf"\n### `{name}`.*?(?=\n### |\n## |\Z)", page, re.DOTALL)
        assert section, f"docs/objectives.md has no section for {name}"
        assert preset.equation in section.group(), f"docs/objectives.md: the equation of {name} is not the code's"
        assert preset.source in section.group()
        assert f"**{preset.status}**" in section.group().lower()
        for option, value in preset.defaults.items():
            if option == "clip":
                shown = " / ".join("none" if bound is None else f"{bound:g}" for bound in value)
                assert shown in section.group(), f"docs/objectives.md: clip of {name} is {shown}"
