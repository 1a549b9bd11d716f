"""One page for each executed notebook: code folded, table of contents, nothing loaded from elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jinja2 import Environment
from nbconvert import HTMLExporter
from nbconvert.filters import Highlight2HTML
from pygments.formatters import HtmlFormatter

from tepo_core.report.method_cards import mathml
from tepo_core.runs.folder import NOTEBOOK, RUN_KINDS

HERE = Path(__file__).parent
HEADING = re.compile(r'<h([1-3]) id="([^"]*)">(.*?)(?:<a class="anchor-link".*?</a>)?</h\1>', re.DOTALL)


@dataclass(frozen=True)
class Page:
    """An executed notebook and its page. group: the stage."""

    group: str
    name: str
    source: Path
    file: str

    @property
    def label(self) -> str:
        return self.name or self.group


def executed_notebooks(root: Path, wanted: dict[str, set[str]]) -> list[Page]:
    """Executed notebooks of the study, in the order of the pipeline. ``wanted``: stage -> names of its declared runs."""
    pages = []
    for stage, path in (("prepare", root / "data" / "prepared" / "notebook.ipynb"),):
        if path.is_file():
            pages.append(Page(stage, "", path, f"{stage}.html"))
    for stage in RUN_KINDS:
        for name in sorted(wanted.get(stage, ())):
            path = root / "runs" / stage / name / NOTEBOOK
            if path.is_file():
                pages.append(Page(stage, name, path, f"{stage}-{name}.html"))
    path = root / "reports" / "analysis" / "notebook.ipynb"
    if path.is_file():
        pages.append(Page("analyse", "", path, "analyse.html"))
    return pages


class NotebookPages:
    """Turns notebooks into pages; one object holds the exporter, which is slow to build."""

    def __init__(self, environment: Environment, css: str) -> None:
        self._template = environment.get_template("notebook.html.j2")
        self._css = css + code_css()
        self._exporter = HTMLExporter(
            template_file="folded.html.j2",
            extra_template_basedirs=[str(HERE / "templates" / "notebook")],
            extra_template_paths=[str(HERE / "templates" / "notebook")],
            filters={"highlight_code": Highlight2HTML(pygments_lexer="python3")},
        )

    def page(self, notebook: Path, title: str) -> str:
        """The page of one notebook. Raises ``ValueError`` naming the file where it cannot be read."""
        try:
            node = nbformat.read(notebook, as_version=4)
        except Exception as error:  # nbformat raises many kinds
            raise ValueError(f"{notebook}: not a notebook ({error}); run its stage again") from None
        for cell in node.cells:
            if cell.cell_type == "markdown":
                cell.source = equations_as_mathml(cell.source)
            for output in cell.get("outputs", []):
                for kind in ("application/javascript", "application/vnd.jupyter.widget-view+json"):
                    output.get("data", {}).pop(kind, None)
        body, _ = self._exporter.from_notebook_node(node)
        body = re.sub(r"<script\b.*?</script>", "", body, flags=re.DOTALL | re.IGNORECASE)
        contents = [
            {"level": int(level), "id": anchor, "text": re.sub(r"<[^>]+>", "", text).strip()}
            for level, anchor, text in HEADING.findall(body)
        ]
        return self._template.render(title=title, css=self._css, body=body, contents=contents)


CODE_OR_MATH = re.compile(r"```.*?```|`[^`]*`|\$\$(?P<block>.+?)\$\$|(?<!\\)\$(?P<inline>[^\s$](?:[^$]*[^\s$])?)\$", re.DOTALL)


def equations_as_mathml(markdown: str) -> str:
    """Markdown whose $...$ and $$...$$ are MathML, which browsers draw without a script; code is left alone.

    What cannot be converted stays as it was written."""

    def converted(match: re.Match) -> str:
        latex = match["block"] or match["inline"]
        if latex is None:
            return match[0]
        try:
            return mathml(latex, block=match["block"] is not None)
        except ValueError:
            return match[0]

    return CODE_OR_MATH.sub(converted, markdown)


def code_css() -> str:
    """Colours of highlighted code, in light and dark."""
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="monokai").get_style_defs(":root[data-theme=dark] .highlight")
    auto = HtmlFormatter(style="monokai").get_style_defs(":root:not([data-theme=light]) .highlight")
    keep = [line for line in light.splitlines() if line.startswith(".highlight")]
    night = [line for line in dark.splitlines() if line.startswith(":root")]
    wide = [line for line in auto.splitlines() if line.startswith(":root")]
    return "\n".join([*keep, *night, "@media (prefers-color-scheme: dark) {", *wide, "}"])
