"""Values of one commented file in the places of another's: what stays, and whose comment wins."""

import pytest

from tepo_core.commands.graft import graft

BASE = """\
# Base.

# For all.

# What runs.
names: [a, b]     # labels
variants: {}

group:            # the group
  size: 1         # units; >= 1
  # about the rate
  rate: 1.0e-4    # per step
  inner:
    depth: 2      # >= 1
  last: "x # y"   # a word
"""


@pytest.mark.parametrize(
    ("own", "edits"),
    [
        ("group:\n  size: 20\n", {"  size: 1         #": "  size: 20        #"}),
        ("group:\n  size: 123456789\n", {"  size: 1         #": "  size: 123456789 #"}),
        ("group:\n  size: 12345678901234\n", {"  size: 1         #": "  size: 12345678901234 #"}),
        ("group:\n  rate: 2.0e-4  # mine\n", {"  rate: 1.0e-4    # per step": "  rate: 2.0e-4  # mine"}),
        ("group:\n  # why\n  rate: 2.0e-4\n", {"  # about the rate": "  # why", "rate: 1.0e-4 ": "rate: 2.0e-4 "}),
        ("group:  # another\n  size: 1\n", {"group:            # the group": "group:  # another"}),
        ("group:\n    inner:\n        depth: 3\n", {"    depth: 2 ": "    depth: 3 "}),
        ("group: {inner: {depth: 3}, size: 4}\n", {"    depth: 2 ": "    depth: 3 ", "  size: 1 ": "  size: 4 "}),
        ("group:\n  last: 'a # b'\n", {'  last: "x # y"   #': "  last: 'a # b'   #"}),
        ("group:\n  last: null\n", {'  last: "x # y"   #': "  last: null      #"}),
        ("names:\n  [c,\n   d]\n", {"names: [a, b]     # labels": "# labels\nnames:\n  [c,\n   d]"}),
        ("names:  # ab\n  - c\n  - d  # last\n\n# end\n", {"names: [a, b]     # labels": "names:  # ab\n  - c\n  - d  # last"}),
        (
            "# Own.\n# Two.\n\n# Mine.\nvariants:\n  # one\n  v: {preset: p}  # of p\n\n# stray\n",
            {"# Base.": "# Own.\n# Two.", "variants: {}": "# Mine.\nvariants:\n  # one\n  v: {preset: p}  # of p"},
        ),
        ("# Own.\nnames: [a]\n", {"# Base.": "# Own.", "names: [a, b]     #": "names: [a]        #"}),
    ],
)  # fmt: skip
def test_lines_of_the_own_file_in_the_places_of_the_base(own: str, edits: dict[str, str]) -> None:
    wanted = BASE
    for old, new in edits.items():
        assert wanted.count(old) == 1
        wanted = wanted.replace(old, new)
    assert graft(BASE, own) == wanted


@pytest.mark.parametrize(
    "own", ["group: {size: &n 3}\nnames: [*n]\n", "group:\n  new: 1\n", "new: 1\n"], ids=["anchor", "new inside", "new"]
)
def test_what_cannot_be_placed_is_refused(own: str) -> None:
    with pytest.raises(ValueError, match="one parameter a line"):
        graft(BASE, own)
