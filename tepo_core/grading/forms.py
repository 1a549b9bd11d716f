r"""Forms in which people and models write one answer: grouped digits, words and units behind a number, equations, choices.

Two kinds of function, both on text alone and linear in it. Some rewrite one answer wherever it stands (``ungroup``,
``unwrap``). :func:`reduce_pair` rewrites gold and answer together, because a form is only read when the other side shows what
was asked: ``x = 7`` is 7 where the gold is a number and stays an equation where the gold is one. Each rule is written as
narrowly as its near misses need (``7 million``, ``7 and a half``, ``12.000``); tests/grading/forms.jsonl holds both.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from tepo_core.grading.constants import constant


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


MAX_FORM = 1_000  # characters of an answer in which forms are looked for

_GROUP = r"(?:\\[ ,;:]|\{\s*,\s*\}|\{\\,\}|~)"
_LATEX_GROUPS = re.compile(rf"(?<![\d.])([1-9]\d{{0,2}})({_GROUP})(\d{{3}}(?:\2\d{{3}})*)(?!\d)")
_SPACED_GROUPS = re.compile(r"([^\d]*)([1-9]\d{0,2}(?:([ '’_])\d{3})(?:\3\d{3})*)((?:[.,]\d+)?(?:[^\d].*)?)", re.DOTALL)
_DOTTED_GROUPS = re.compile(r"([^\d]*)([1-9]\d{0,2}(?:\.\d{3}){2,})(,\d+)?([^\d]*)", re.DOTALL)
_SECOND_NUMBER = re.compile(r"(?<![\^_{\d.,])\d")
_WRAPPER = re.compile(r"\\(?:textbf|mathbf|boldsymbol|bm|bf|underline|textit|emph|fbox|framebox|textsf|ensuremath)\s*\{")
_COLOUR = re.compile(r"^\{?\s*\\(?:text)?color(?:box)?\s*\{[A-Za-z!0-9]*\}\s*")
_SPACING = r"(?:\s|~|\\[ ,;:!]|\\q?quad(?![A-Za-z]))"
_ENDS = re.compile(rf"^{_SPACING}+|(?:{_SPACING}|\\text\s*\{{\s*[.,;]?\s*\}})+$")

# A number of the plain sort, and what may stand behind it.
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:\s*/\s*\d+|\\[dt]?frac\s*\{\d+\}\s*\{\d+\})?"
    r"(?:\\sqrt\s*\{\d+\}|\\pi(?![A-Za-z]))?"
)
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathsf|mbox|operatorname|rm)\s*\{([^{}]*)\}")
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_UNIT = re.compile(
    rf"(?:\^\s*\{{?\s*\\circ\s*\}}?|\\degrees?(?![A-Za-z]))?{_SPACING}*"
    rf"(?:[A-Za-z]+\.?{_POWER}(?:(?:{_SPACING}|/|\\cdot|\*|-|·)+[A-Za-z]+\.?{_POWER})*)?{_SPACING}*"
)
_QUANTITY = re.compile(rf"({_NUMBER}){_SPACING}*-?{_SPACING}*([^\d\s].*)?", re.DOTALL)
_CURRENCY = re.compile(r"(?:(?:US|A|C|HK)\\?\$|USD|EUR|GBP|CNY|INR|Rs\.?|\\pounds|\\euro|\\yen)\s*(?=[-+\d.])")
_PERCENT_WORD = re.compile(r"%|per ?cent|pct")
_MIXED = re.compile(r"(-?)(\d{1,9})(?: and |[ -])(\d{1,9})/(\d{1,9})")
ORDINAL = re.compile(  # 12th, 12^{th}, 12^{\text{th}}
    r"([+-]?\d*(?:1[123](?=\D*th)|(?<!1)1(?=\D*st)|(?<!1)2(?=\D*nd)|(?<!1)3(?=\D*rd)|[04-9](?=\D*th)))"
    r"\s*(?:\^|\\textsuperscript)?[\s{]*(?:\\(?:text|textrm|mathrm|mbox|rm)[\s{]*)?(?:st|nd|rd|th)[\s}]*"
)
_NEARLY_ORDINAL = re.compile(r"(\d+)\s*(?:\^\s*)?\{?\s*(?:\\(?:text|mathrm|textrm)\s*\{\s*)?(?:st|nd|rd|th)\s*\}{0,2}")
SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "bn": 9, "mn": 6, "hundred": 2}
_CHANGES = _set(  # words that make another number, or no single one, of the number before them
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth "
    "ninths tenth tenths hundredth hundredths thousandth thousandths squared cubed factorial double twice dozen dozens score pi "
    "and or to over times plus minus divided by less more greater fewer than at least most not isn is are was wrong incorrect "
    "sqrt root mod modulo thousands millions billions hundreds base choose if when where for but"
)
_MATHEMATICS = _set("sin cos tan cot sec csc log ln exp lim max min gcd lcm inf infty infinity oo nan")
_UNITS_OF_ONE_LETTER = _set("m s g h k l L N J W V A K C F")
_SHORT_UNITS = _set(
    "cm mm km dm nm ft in yd mi kg mg lb oz ml cl dl hr hrs min mins sec secs ms ns us hz khz mhz ghz pa kpa kj kw kwh mph kph "
    "kmh rpm usd eur gbp deg rad mol kcal cal ev kev mev gev au pc ly kb mb gb tb cc pt qt gal db ohm sq cu"
)
_SMALL = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBER_WORDS = {word: value for value, word in enumerate(_SMALL)} | {
    ten + joint + (one if value else ""): 10 * (place + 2) + value
    for place, ten in enumerate(_TENS)
    for value, one in enumerate(_SMALL[:10])
    for joint in (("-", " ") if value else ("",))
}

_LOR = re.compile(r"\s*\\(?:lor|vee)(?![A-Za-z])\s*")
_GLUED = re.compile(r"(?<=[\d)}\]])(?:or|and)(?=\s*(?:[-\d(\[\\]|[A-Za-z]\s*(?:[=(_]|\\in)))")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|leq|geq|ne|neq|in|notin|leqslant|geqslant|subset|cup|cap)(?![A-Za-z])|!=")
_SIGN = re.compile(
    r"\\[{}|]|[{}()\[\]]|!=|[<>]=?|:?==?|,|\\(?P<about>approx|simeq|doteq)(?![A-Za-z])|\\(?P<same>equiv)(?![A-Za-z])|"
    r"\\[A-Za-z]+|\b(?:and|or)\b"
)
_MODULUS = re.compile(
    r"(.*?)[\s,]*(?:\\pmod\s*\{?\s*([^{}]+?)\s*\}?|\(\s*(?:\\text\s*\{\s*)?\\?mod\s*\}?\s*([^()]+?)\s*\)|"
    r"\\mod\s*\{?\s*([^{}]+?)\s*\}?)",
    re.DOTALL,
)
_NAME = re.compile(
    r"(?:[A-Za-z]+'*(?:_[A-Za-z0-9,+-]+)?'*(?:\^\*)?(?:\([A-Za-z0-9_,\s]*\))?|\|[A-Z]{1,3}\||\[[A-Z]{3,6}\]|frac(?:d[A-Za-z]?d[a-z]))"
)
_ROWS = re.compile(
    r"\\begin\s*\{(aligned|align\*?|gathered|gather\*?|split|eqnarray\*?|equation\*?)\}(.*)\\end\s*\{\1\}[\s.,]*", re.DOTALL
)
_ROW_START = re.compile(r"\\begin\s*\{(?:align|gather|split|eqnarray|cases)")
_LETTERED = re.compile(
    rf"(?:\\(?:text(?:bf|rm)?|math(?:bf|rm))\s*\{{\s*)?\(([A-J])\)\s*\}}?(?:{_SPACING}|[:.])*(\S.*)|([A-J])[.):]{_SPACING}+(\S.*)",
    re.DOTALL,
)
_MORE_LETTERS = re.compile(rf"(?:and|or|,|&|/|\\text\s*\{{\s*(?:and|or)\s*\}}|{_SPACING})*\(?[A-J]\)?(?![A-Za-z0-9^_+*/=-])")
_PIECE = re.compile(r"([\[\](])([^\[\](),;]+)[,;]([^\[\](),;]+)([\[\])])")
_UNION = re.compile(r"\s*(?:\\cup(?![A-Za-z])|(?<=[\])\[])\s*U\s*(?=[\[\](]))\s*")
_INFINITY = re.compile(r"([-+]?)\s*(?:\\?inf(?:ty|inity)?|oo|\\text\s*\{\s*inf(?:ty|inity)?\s*\})\s*")


def ungroup(text: str) -> str:
    r"""Digits grouped in threes written together: ``12\,000``, ``12{,}000``, ``12 000``, ``12'000``, ``12_000``, ``1.234.567``.

    All separators of a number must be the same. One dot is always a decimal point (``12.000`` is twelve), one comma always
    groups (``12,000``), which :func:`tepo_core.grading.compare.integer` reads. A space, apostrophe or underscore counts only
    where no other number stands in the answer."""
    text = _LATEX_GROUPS.sub(lambda m: m[1] + m[3].replace(m[2], ""), text)
    if (match := _DOTTED_GROUPS.fullmatch(text)) is not None:
        return match[1] + match[2].replace(".", "") + (match[3] or "").replace(",", ".") + match[4]
    match = _SPACED_GROUPS.fullmatch(text)
    if match is None or _SECOND_NUMBER.search(match[4].lstrip(".,0123456789")):
        return text
    return match[1] + match[2].replace(match[3], "") + match[4]


def unwrap(text: str) -> str:
    r"""The answer without bold, underline, frame or colour around the whole of it, and without spacing at its ends."""
    for _ in range(8):
        before = text
        text = _ENDS.sub("", text)
        if colour := _COLOUR.match(text):
            text = text[colour.end() :]
            text = text[:-1] if before.startswith("{") and text.endswith("}") else text
        if (match := _WRAPPER.match(text)) and _closing(text, match.end()) == len(text) - 1:
            text = text[match.end() : -1]
        elif text.startswith("{") and _closing(text, 1) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            break
    return text


def _closing(text: str, start: int) -> int:
    """Position of the brace that closes the group whose content starts at ``start``; -1 without one."""
    depth, escaped = 1, False
    for position in range(start, len(text)):
        c = text[position]
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif c in "{}":
            depth += 1 if c == "{" else -1
            if not depth:
                return position
    return -1


class Reduced(NamedTuple):
    """Gold and answer as they are compared, a verdict where the form alone decides, and the rules that were applied."""

    gold: str
    answer: str
    verdict: bool | None
    rules: tuple[str, ...]


def reduce_pair(gold: str, answer: str) -> Reduced:
    """Both cleaned answers brought to one form, each rule only where the other side asks for it. Long texts stay as they are."""
    pair, rules = [gold, answer], []
    if max(len(gold), len(answer)) > MAX_FORM:
        return Reduced(gold, answer, None, ())
    for rule, step in _STEPS:
        found = step(*pair)
        if isinstance(found, str):
            return Reduced(*pair, False, (*rules, found))
        if found != tuple(pair):
            pair = list(found)
            rules.append(rule)
    return Reduced(pair[0], pair[1], None, tuple(rules))


def _alternatives(gold: str, answer: str) -> tuple[str, str]:
    r"""``f(x)=2orf(x)=-2`` and ``x = 1 \lor x = 2`` are lists. Not between inequalities, where "or" joins conditions."""
    return _listed(gold), _listed(answer)


def _listed(text: str) -> str:
    if _INEQUALITY.search(text):
        return text
    return _GLUED.sub(", ", _LOR.sub(", ", text))


def _last_row(gold: str, answer: str) -> tuple[str, str]:
    """Of a derivation over several rows the last one, when the gold is no equation; a system keeps its rows."""
    match = _ROWS.fullmatch(answer)
    if not match or "=" in gold or "\\begin" in match[2]:
        return gold, answer
    rows = [row.replace("&", " ").strip(" .,") for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2])]
    rows = [_ENDS.sub("", row) for row in rows if row]
    names = {_name(row.split("=")[0]) for row in rows if "=" in row} - {""}
    return (gold, rows[-1]) if rows and len(names) < 2 else (gold, answer)


def _modulus(gold: str, answer: str) -> tuple[str, str] | str:
    r"""``3 \pmod 4`` answers 3 where the gold names no modulus; where it does, the answer names the same."""
    ours, theirs = (_MODULUS.fullmatch(text) if "mod" in text else None for text in (gold, answer))
    if not ours:
        return (gold, theirs[1]) if theirs else (gold, answer)
    if not theirs:
        return "the gold names a modulus and the answer does not"
    moduli = [re.sub(r"[\s${}\\]", "", next(group for group in match.groups()[1:] if group)) for match in (ours, theirs)]
    return (ours[1], theirs[1]) if moduli[0] == moduli[1] else "another modulus"


def _right_side(gold: str, answer: str) -> tuple[str, str]:
    r"""The last side of an equation, where the other side of the comparison is no relation, or an equation for the same name.

    ``23 \bmod 4 = 3`` is 3; of ``x = 1/3 \approx 0.33`` the exact side counts, or the rounded one where the gold is a decimal.
    A gold equation gives its right side only when its left side is a name: ``a + 3z = 0`` is not answered by 0."""
    ours, theirs = sides(gold), sides(answer)
    if ours is None or theirs is None:
        return _solutions(gold, answer)
    if len(ours) > 1 and len(theirs) > 1 and _name(ours[0][0]) and _name(ours[0][0]) == _name(theirs[0][0]):
        return _last(ours, ""), _last(theirs, ours[-1][0])
    if len(ours) > 1 and len(theirs) == 1:
        return (_last(ours, answer), answer) if _name(ours[0][0]) else (gold, answer)
    return (gold, _last(theirs, gold)) if len(theirs) > 1 and len(ours) == 1 else (gold, answer)


def _solutions(gold: str, answer: str) -> tuple[str, str]:
    """Of a list of values of one quantity, ``f(x) = 2, f(x) = -2``, the values, where the other side has that name or none."""
    ours, theirs = _values(gold), _values(answer)
    if ours is None or theirs is None or not (ours[0] or theirs[0]) or (ours[0] and theirs[0] and ours[0] != theirs[0]):
        return gold, answer
    return ours[1], theirs[1]


def _values(text: str) -> tuple[str, str] | None:
    """Name and listed values of ``x = 1, x = 2`` or ``x = 1``; no name for a text without equations; ``None`` for the rest."""
    if "=" not in text:
        return None if _INEQUALITY.search(text) else ("", text)
    names, values = set(), []
    for part in re.split(r"\s*,\s*", text):
        found = sides(part)
        if found is None or len(found) != 2:
            return None
        names.add(_name(found[0][0]))
        values.append(found[1][0])
    name = names.pop()
    return (name, ", ".join(values)) if name and not names else None


def _last(parts: list[tuple[str, bool]], other: str) -> str:
    """The side that is the answer: of (text, stands behind a sign of approximation), in order."""
    exact = [text for text, rounded in parts if not rounded]
    if len(exact) < len(parts) and (re.fullmatch(r"[-+]?\d*\.\d+", other) or all(_name(text) for text in exact)):
        return parts[-1][0]
    if len(exact) == 2 and _name(exact[1]) and not _name(exact[0]) and constant(exact[0]) is not None:
        return exact[0]  # 7 = x
    return exact[-1]


def sides(text: str) -> list[tuple[str, bool]] | None:
    """Sides of a chain of equations outside all brackets, each with whether it stands behind a sign of approximation; one side
    for a text that is no relation; ``None`` for inequalities, lists of equations and anything unbalanced."""
    if "=" not in text and "\\approx" not in text and "\\equiv" not in text and "\\simeq" not in text:
        return None if _INEQUALITY.search(text) else [(text, False)]
    if _ROW_START.search(text):
        return None
    parts, start, depth, rounded = [], 0, 0, False
    for match in _SIGN.finditer(text):
        sign = match[0]
        if sign in ("{", "(", "[", "\\{"):
            depth += 1
        elif sign in ("}", ")", "]", "\\}"):
            depth -= 1
        elif sign in ("and", "or") or (depth == 0 and (sign == "," or _INEQUALITY.match(sign))):
            return None
        elif depth == 0 and (sign[0] in ":=" or match["about"] or match["same"]):
            parts.append((_ENDS.sub("", text[start : match.start()]), rounded))
            start, rounded = match.end(), rounded or bool(match["about"])
    parts.append((_ENDS.sub("", text[start:]), rounded))
    parts = [part for part in parts if part[0]]
    return parts if parts and depth == 0 else None


def _name(text: str) -> str:
    r"""A quantity's name in one form (``P_{\min}``, ``f(x)``, ``|AB|``, ``\text{Area}``); empty for anything else."""
    plain = re.sub(r"\\(?:text|mathrm|operatorname|mathbf|left|right|angle|triangle)(?![A-Za-z])|[\s{}\\$]", "", text)
    return plain if _NAME.fullmatch(plain) else ""


def _lettered(gold: str, answer: str) -> tuple[str, str] | str:
    """A choice given with its letter, ``(A) 7``: the letter where the gold is a letter, the value where it is not."""
    match = _LETTERED.fullmatch(answer)
    if not match:
        return gold, answer
    letter, value = match[1] or match[3], match[2] or match[4]
    if re.fullmatch(r"(?:\\text\s*\{|\\mathrm\s*\{)?\s*\(?([A-J])\)?\.?\s*\}?", gold):
        return (gold, answer) if _MORE_LETTERS.match(value) else (gold, letter)
    return (gold, value) if constant(gold) is not None else (gold, answer)


def _quantities(gold: str, answer: str) -> tuple[str, str] | str:
    """A number with a word or unit behind it is the number; with a word that changes it (million, squared, and a half) it is
    what the words say or, against a plain number, not equal."""
    ours, theirs = quantity(gold), quantity(answer)
    if theirs == "" and ours != "" and (ours or constant(gold) is not None):
        return "words beside the number change it"
    if ours == "":
        return "words beside the gold's number change it" if gold.startswith(theirs or answer) else (gold, answer)
    if ours is None and constant(gold) is None or theirs is None and constant(answer) is None:
        return gold, answer
    return ours or gold, theirs or answer


def quantity(text: str) -> str | None:
    """The number of ``7 apples``, ``7~\\mathrm{m/s}``, ``USD 7``, ``12th``, ``5 million``, ``seven``; an empty text when words
    change the number in a way that is not read; ``None`` when the text has another form, a plain number included."""
    if _PERCENT_WORD.search(text):
        return None
    if mixed := _MIXED.fullmatch(text):
        whole, top, bottom = int(mixed[2]), int(mixed[3]), int(mixed[4])
        return rf"{mixed[1]}\frac{{{whole * bottom + top}}}{{{bottom}}}" if 0 < top < bottom else None
    if (value := NUMBER_WORDS.get(_TEXT.sub(r"\1", text).strip().lower())) is not None:
        return str(value)
    if _NEARLY_ORDINAL.fullmatch(text):  # 2^{th} is a power of 2, no second
        ordinal = ORDINAL.fullmatch(text)
        return ordinal[1] if ordinal else None
    bare = _CURRENCY.sub("", text, count=1)
    match = _QUANTITY.fullmatch(bare)
    if not match or not any(c.isdigit() for c in match[1]):
        return None
    number, rest = match[1], match[2] or ""
    if not rest:
        return number if bare != text else None
    written = _TEXT.sub(lambda m: f" {m[1]} ", rest)
    words = re.findall(r"(?<!\\)\b[A-Za-z]+", written)
    lowered = [word.lower() for word in words]
    if lowered and lowered[0] in SCALES and _UNIT.fullmatch(written) and not _CHANGES.intersection(lowered[1:]):
        return _scaled(number, SCALES[lowered[0]])
    marked = "\\text" in rest or "\\mathrm" in rest or "\\mbox" in rest
    if _CHANGES.intersection(lowered) or (marked and len(words) > 1 and re.search(r"[A-Za-z]\s+\d", written)):
        return "" if marked or " " in rest.strip() or len(lowered[0]) > 3 else None
    if not _UNIT.fullmatch(written) or len(words) > 6 or _MATHEMATICS.intersection(lowered):
        return None
    return number if marked or all(_is_unit(word, "/" in written) for word in words) else None


def _is_unit(word: str, compound: bool) -> bool:
    """Whether a bare word behind a number is a unit or a thing counted, and not a product of variables."""
    return len(word) > 3 or word.lower() in _SHORT_UNITS or (compound and word in _UNITS_OF_ONE_LETTER) or word == "per"


def _scaled(number: str, zeros: int) -> str:
    value = constant(number)
    if value is None or not isinstance(value[0], Fraction):
        return ""
    shifted = value[0] * 10**zeros
    return str(shifted.numerator) if shifted.denominator == 1 else rf"\frac{{{shifted.numerator}}}{{{shifted.denominator}}}"


def _intervals(gold: str, answer: str) -> tuple[str, str]:
    r"""``]0,1[``, ``[0;1]``, ``(-inf, 3]`` and ``(0,1)U(2,3)`` as ``(0,1)``, ``[0,1]``, ``(-\infty,3]`` and ``\cup``."""
    if gold[:1] not in ("(", "[", "]") and answer[:1] not in ("(", "[", "]"):
        return gold, answer
    return interval(gold), interval(answer)


def interval(text: str) -> str:
    """An interval, or a union of them, with the brackets and signs of the textbooks; any other text as it is."""
    pieces = [_PIECE.fullmatch(piece.strip()) for piece in _UNION.split(re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text))]
    if not pieces or not all(pieces):
        return text
    reversed_or_named = "]" in text[:1] or text.endswith("[") or ";" in text or "inf" in text or "oo" in text or "U" in text
    if not (reversed_or_named or any(p[1] == "]" or p[4] == "[" for p in pieces)):
        return text
    opening, closing = {"]": "("}, {"[": ")"}
    ends = [
        [_INFINITY.sub(r"\1\\infty", end.strip()) if _INFINITY.fullmatch(end.strip()) else end.strip() for end in (p[2], p[3])]
        for p in pieces
    ]
    written = [opening.get(p[1], p[1]) + a + "," + b + closing.get(p[4], p[4]) for p, (a, b) in zip(pieces, ends, strict=True)]
    return r"\cup".join(written)


_STEPS = (
    ("alternatives joined by 'or' are a list", _alternatives),
    ("of the rows of a derivation, the last", _last_row),
    ("the modulus stands apart", _modulus),
    ("of an equation, the right side", _right_side),
    ("a choice with its letter", _lettered),
    ("words or units beside the number", _quantities),
    ("brackets of an interval", _intervals),
)
