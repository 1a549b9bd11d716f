"""``python -m tepo_core.analysis.figures NAME``: draw figures again."""

from tepo_core.analysis.figures.draw import main

main()
