"""Executed notebooks as a stage leaves them, for tests of the report."""

from __future__ import annotations

from pathlib import Path

import nbformat


def make_notebook(path: Path, name: str) -> None:
    cells = [
        nbformat.v4.new_markdown_cell(f"# Train\n\n## {name} results\n\nSome $x^2$.", id="cell-00"),
        nbformat.v4.new_code_cell(
            "print('hello')", id="cell-01", outputs=[nbformat.v4.new_output("stream", name="stdout", text="hello\n")]
        ),
        nbformat.v4.new_code_cell(
            "frame",
            id="cell-02",
            outputs=[
                nbformat.v4.new_output(
                    "display_data", data={"text/html": "<table><tr><td>7</td></tr></table><script>alert(1)</script>"}
                )
            ],
        ),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
