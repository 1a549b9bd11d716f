"""One commented YAML file with the values that a second one states put in their places, line by line, so that comments stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node

from tepo_core.config import WHOLE, merged


@dataclass(frozen=True)
class Entry:
    """A parameter in a file. lines: as written, indented by ``indent``; comment: what stands behind the value, or ''.

    first, last: numbers of its lines. lead: comment lines directly above it. column: where its comment starts."""

    first: int
    last: int
    indent: int
    lines: list[str]
    lead: list[str]
    comment: str
    column: int


def graft(base: str, own: str) -> str:
    """The text of ``base`` with the parameters of ``own``, and with its first comment lines in place of the first ones there.

    A comment in ``own``, behind a value or directly above a parameter, wins over the one in ``base``. Raises ``ValueError``
    where the lines do not give the merged values: an anchor, or two parameters on a line of ``base``."""
    lines, header = base.splitlines(), _header(own)
    here = dict(_entries(base))
    found = [(here[name], entry) for name, entry in _entries(own) if name in here]
    for old, new in sorted(found, key=lambda pair: pair[0].first, reverse=True):
        lead = new.lead or old.lead
        lines[old.first - len(old.lead) : old.last + 1] = [*lead, *_written(old, new)]
    text = "\n".join([*(header or _header(base)), *lines[len(_header(base)) :]]) + "\n"
    read = YAML(typ="safe").load
    try:
        right = read(text) == merged(read(base), read(own))
    except YAMLError:
        right = False
    if not right:
        raise ValueError("write one parameter a line, without anchors, and none that the base does not have")
    return text


def _written(old: Entry, new: Entry) -> list[str]:
    """The lines of ``new`` at the indentation of ``old``; with the comment of ``old`` where it has none of its own."""
    shift = old.indent - new.indent
    lines = [" " * shift + line if shift > 0 else line[-shift:] for line in new.lines]
    if new.comment or not old.comment:
        return lines
    if len(lines) == 1 and len(old.lines) == 1:
        return [f"{lines[0].ljust(old.column - 1)} {old.comment}"]
    return [f"{' ' * old.indent}{old.comment}", *lines]


def _header(text: str) -> list[str]:
    """The comment lines that a file begins with."""
    lines = text.splitlines()
    return lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))]


def _entries(text: str) -> Iterator[tuple[tuple[str, ...], Entry]]:
    root = YAML(typ="safe", pure=True).compose(text)
    if isinstance(root, MappingNode):
        yield from _walk(root, text, ())


def _walk(node: MappingNode, text: str, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Entry]]:
    lines, header = text.splitlines(), len(_header(text))
    for key, value in node.value:
        name = (*path, key.value)
        group = isinstance(value, MappingNode) and key.value not in WHOLE
        if node.flow_style:  # {a: 1, b: 2}: the value alone; it has no line of its own
            if not group:
                words = " ".join(text[value.start_mark.index : value.end_mark.index].split())
                yield (
                    name,
                    Entry(
                        first=key.start_mark.line,
                        last=key.start_mark.line,
                        indent=0,
                        lines=[f"{key.value}: {words}"],
                        lead=[],
                        comment="",
                        column=0,
                    ),
                )
        elif not (group and value.flow_style):
            yield name, _entry(key, key if group else value, lines, header)
        if group:
            yield from _walk(value, text, name)


def _entry(key: Node, value: Node, lines: list[str], header: int) -> Entry:
    """``value`` is the key itself for a group, whose parameters have entries of their own."""
    first, indent = key.start_mark.line, key.start_mark.column
    last, column = _end(value)
    below = value is key or value.start_mark.line > first  # then a comment stands behind the name
    behind = lines[first][key.end_mark.column + 1 :] if below else lines[last][column:]
    comment, above = behind.strip(), first
    while above > header and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    start = lines[first].rfind(comment) if comment else 0
    return Entry(
        first=first,
        last=last,
        indent=indent,
        lines=lines[first : last + 1],
        lead=lines[above:first],
        comment=comment,
        column=start,
    )


def _end(node: Node) -> tuple[int, int]:
    """Line and column behind a value; of a block, behind its last value."""
    if not isinstance(node.value, str) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    mark = node.end_mark
    return (mark.line - 1, 10**6) if mark.column == 0 and mark.line > node.start_mark.line else (mark.line, mark.column)
