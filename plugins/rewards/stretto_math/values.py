"""Read mathematical values as they are written in answers, and decide whether two of them are equal.

The outer structure (lists, tuples, intervals, sets, matrices, equations) is read and compared here, plain
numbers as exact fractions. Only the remaining expressions go to math-verify and SymPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any
from unicodedata import normalize


class Unreadable(ValueError):
    """A text that is not mathematics."""


@dataclass(frozen=True)
class Number:
    """A number that is written out: its exact value and, for a decimal, its number of decimal places."""

    value: Fraction
    places: int | None = None


@dataclass(frozen=True)
class Expression:
    """An expression for SymPy."""

    latex: str


@dataclass(frozen=True)
class Unit:
    """A unit such as km/h, or the thing that was counted."""

    powers: frozenset[tuple[str, int]] = frozenset()
    """Known units with their powers, without those of power 0."""
    nouns: frozenset[str] = frozenset()
    """Other words, such as `apple`."""

    def agrees(self, other: Unit) -> bool:
        """Return whether both units are the same, or one of them is missing."""
        if Unit() in (self, other):
            return True
        return self.powers == other.powers and (
            not self.nouns or not other.nouns or bool(self.nouns & other.nouns)
        )


@dataclass(frozen=True)
class Quantity:
    """A number or an expression with its percent sign and unit."""

    value: Number | Expression
    percent: bool = False
    unit: Unit = Unit()


@dataclass(frozen=True)
class BasedInteger:
    """An integer with its base written as an index."""

    digits: str
    base: str


@dataclass(frozen=True)
class Assignment:
    """`name = value`."""

    name: str
    value: Value


@dataclass(frozen=True)
class Equation:
    """An equation that is no assignment."""

    left: Expression
    right: Expression


@dataclass(frozen=True)
class Items:
    """Several values between brackets. `opening` is `,` for a list without brackets, `|` for a union."""

    opening: str
    items: tuple[Value, ...]
    closing: str
    name: str = ""
    """The variable of an interval that was written as an inequality; else empty."""

    @property
    def ordered(self) -> bool:
        """Whether the order of the items matters."""
        return self.opening not in (",", "|", "{")


@dataclass(frozen=True)
class Matrix:
    """Rows of values."""

    rows: tuple[tuple[Value, ...], ...]


Value = Quantity | BasedInteger | Assignment | Equation | Items | Matrix
_INFINITY, _MINUS_INFINITY = Quantity(Expression(r"\infty")), Quantity(Expression(r"-\infty"))

# ------------------------------------------------------------------------------------------ reading

FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_REPLACEMENTS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ",
    "{,}": ",", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\%": "%", r"\$": "$", "~": " ",
    r"\quad": " ", r"\degree": r"^\circ ", r"\colon": ":",
    "∅": r"\{\}", r"\emptyset": r"\{\}", r"\varnothing": r"\{\}", "≈": r"\approx ",
    r"\lor": " or ", r"\vee": " or ", r"\land": " and ",
    **{each: rf"\frac{{{normalize('NFKC', each).replace('⁄', '}{')}}}" for each in FRACTIONS},
}  # fmt: skip
FONT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mbox|operatorname)\s*\{"
_REWRITES: tuple[tuple[str, str], ...] = (
    (r",\s*\\!\s*", ","),
    (r"(?<!\\)\\ ", " "),
    (r"(?<!\\)\\[!,;:]|\\(?:displaystyle|limits|left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\l?eq?(?:slant)?(?![a-zA-Z])|\\le(?:qslant)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq?(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (FONT + r"\s*,?\s*(or|and)\s*\}", r" \1 "),
    (rf"\\frac ?\{{ ?{FONT}([^{{}}]*)\}} ?\}} ?\{{ ?{FONT}([^{{}}]*)\}} ?\}}", r"\\text{\1/\2}"),
    (rf"({FONT}[^{{}}]*)\}} ?(/) ?{FONT}", r"\1\2"),
    (rf"\^ ?\{{? ?\\circ ?\}}? ?(?:{FONT} ?)?([CF])(?![a-zA-Z])(?: ?\}})?", r"\\text{°\1}"),
    (r"√\s*(\d+)", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt"),
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
    (r"\^\(([^()]*)\)", r"^{\1}"),
    (r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|log|ln|exp)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])(?:infinity|infty|inf)(?![a-zA-Z])", r"\\infty "),
    (r"\s+", " "),
)
_NAME = r"(?:\\[a-zA-Z]+|[a-zA-Z])(?:_(?:\w|\{\w+\}))?'?"
_VARIABLE = re.compile(rf"{_NAME}$")
_LEFT_SIDE = re.compile(rf"{_NAME}(?:\([a-zA-Z](?:, ?[a-zA-Z])*\))?$")
_RELATIONS = re.compile(r"(\\le |\\ge |<|>)")
_BUILDER = re.compile(r"\\\{ ?(" + _NAME + r") ?(?:\\mid|\||:) ?(.+)\\\}$")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\1\}$", re.DOTALL)
_BASED_INTEGER = re.compile(r"([0-9A-F]+)_\{?(\d{1,2})\}?$")
_UNWANTED_WORD = re.compile(r"(?<![\\a-zA-Z{])(?!begin|end|[pbvV]matrix)[a-zA-Z]{3,}")


def read(text: str) -> Value:
    """Read the value that a text states. Raise `Unreadable` if the text is not mathematics."""
    try:
        return _read(_clean(text))
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error


def _clean(text: str) -> str:
    for old, new in _REPLACEMENTS.items():
        text = text.replace(old, new)
    for pattern, new in _REWRITES:
        text = re.sub(pattern, new, text)
    return text.strip().rstrip(".;:,").strip()


def _read(text: str) -> Value:
    text = text.strip()
    while text.startswith("{") and _matching(text, 0) == len(text) - 1:
        inner = text[1:-1].strip()
        parts = _split(inner, re.compile(",")) if inner else []
        if len(parts) != 1 and _number(inner) is None:
            return _items("{", [_read(part) for part in parts], "}")  # a set, not written in LaTeX
        text = inner
    if re.fullmatch(r"\\mathbb ?\{? ?R ?\}?", text):
        text = r"(-\infty,\infty)"
    if not text:
        raise Unreadable("empty")
    for reader in _READERS:
        if (value := reader(text)) is not None:
            return value
    return _quantity(text)


def _list(text: str) -> Value | None:
    parts = [part for part in _split(text, re.compile(r"[,;]| or | and ")) if part.strip()]
    if not parts or parts == [text]:
        return None
    if len(parts) == 2 and re.fullmatch(r" ?" + _NAME + r" ?\\in ?\\mathbb ?\{?[A-Z]\}? ?", parts[1]):
        return _read(parts[0])  # "where k is an integer"
    if len(parts) == 1:
        return _read(parts[0])
    values = [_read(part) for part in parts]
    if all(equal(values[0], value) for value in values) and not re.search("[,;](?! or )| and ", text):
        return values[0]  # 5/8 or 62.5%
    union = any(isinstance(value, Items) and (value.name or value.opening == "|") for value in values)
    return _items("|" if union else ",", values, "")


def _items(opening: str, values: list[Value], closing: str) -> Items:
    """Make `Items`. Merge a list without brackets into a list without brackets, or a set, around it."""
    flat: list[Value] = []
    for value in values:
        bare = isinstance(value, Items) and opening + value.opening in (",,", "||", "{,")
        flat.extend(value.items if isinstance(value, Items) and bare else [value])
    return Items(opening, tuple(flat), closing)


def _union(text: str) -> Value | None:
    parts = _split(text, re.compile(r"\\cup"))
    return _items("|", [_read(part) for part in parts], "") if len(parts) > 1 else None


def _membership(text: str) -> Value | None:
    match = re.match(_NAME + r" ?\\in ?(?![a-z])", text)
    return _read(text[match.end() :]) if match else None


def _brackets(text: str) -> Value | None:
    if match := _BUILDER.match(text):
        return _read(match[2])
    is_set = text.startswith(r"\{")
    start = 1 if is_set else 0
    if text[start] not in "([{" or _matching(text, start) != len(text) - 1:
        return None
    inner = text[start + 1 : -2 if is_set else -1]
    if is_set:
        parts = _split(inner, re.compile(r"[,;]")) if inner.strip() else []
        return _items("{", [_read(part) for part in parts], "}")
    parts = _split(inner, re.compile(r"[,;]"))
    if len(parts) == 1:
        return _read(inner)
    return _items(text[0], [_read(part) for part in parts], text[-1])


def _matrix(text: str) -> Value | None:
    if not (match := _MATRIX.match(text)):
        return None
    rows = [row for row in _split(match[2], re.compile(r"\\\\")) if row.strip()]
    return Matrix(tuple(tuple(_read(cell) for cell in _split(row, re.compile("&"))) for row in rows))


def _equation(text: str) -> Value | None:
    sides = _split(text, re.compile(r"="))
    if len(sides) < 2:
        return None
    left, right = sides[0].strip(), sides[-1]
    if re.fullmatch(rf"\( ?{_NAME} ?(?:, ?{_NAME} ?)+\)", left) and len(sides) == 2:
        return _read(right)
    if _LEFT_SIDE.match(left):
        return Assignment(re.sub(r"[{} ]", "", left), _read(right))
    if len(sides) == 2 and _VARIABLE.match(right.strip()):
        return Assignment(right.strip(), _read(left))
    if len(sides) > 2 or not re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", f"{left} {_without_unit(right)[0]}"):
        return _read(right)  # a calculation
    return Equation(_expression(left), _expression(right.strip()))


def _exclusion(text: str) -> Value | None:
    """Read `x ≠ 2` as all numbers below and above."""
    sides = [side.strip() for side in _split(text, re.compile(r"\\ne "))]
    if len(sides) != 2 or not (name := next(filter(_VARIABLE.match, sides), "")):
        return None
    hole = _read(sides[1] if name == sides[0] else sides[0])
    below, above = (_MINUS_INFINITY, hole), (hole, _INFINITY)
    return Items("|", (Items("(", below, ")", name), Items("(", above, ")", name)), "")


def _inequality(text: str) -> Value | None:
    parts = _split(text, _RELATIONS, keep=True)
    sides, signs = [part.strip() for part in parts[::2]], [part.strip() for part in parts[1::2]]
    if signs and signs[0] in (">", r"\ge"):  # from the smaller to the larger side
        mirrored = {">": "<", r"\ge": r"\le"}
        if any(sign not in mirrored for sign in signs):
            return None
        sides, signs = sides[::-1], [mirrored[sign] for sign in signs[::-1]]
    if not signs or any(sign not in ("<", r"\le") for sign in signs):
        return None
    if len(signs) == 2 and _VARIABLE.match(sides[1]):
        name, low, high = sides[1], _read(sides[0]), _read(sides[2])
    elif len(signs) == 1 and _VARIABLE.match(sides[0]):
        name, low, high = sides[0], _MINUS_INFINITY, _read(sides[1])
    elif len(signs) == 1 and _VARIABLE.match(sides[1]):
        name, low, high = sides[1], _read(sides[0]), _INFINITY
    else:
        return None
    opening = "[" if signs[0] == r"\le" and low is not _MINUS_INFINITY else "("
    closing = "]" if signs[-1] == r"\le" and high is not _INFINITY else ")"
    return Items(opening, (low, high), closing, name)


def _plus_minus(text: str) -> Value | None:
    if r"\pm" not in text:
        return None
    upper = text.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return _items(",", [_read(upper.lstrip("+ ")), _read(lower)], "")


def _ratio(text: str) -> Value | None:
    if not re.fullmatch(r"\d+(?: ?: ?\d+)+", text):
        return None
    return Items(":", tuple(_read(part) for part in text.split(":")), "")


def _based_integer(text: str) -> Value | None:
    match = _BASED_INTEGER.match(re.sub(FONT + r"([^{}]*)\}", r"\1", text))
    return BasedInteger(match[1], match[2]) if match else None


# ---------------------------------------------------------------------------------------- quantities

_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "dm", "m meter metre",
        "km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile", "acre",
        "ha hectare", "mg milligram", "g gram", "kg kilogram", "lb pound", "oz ounce", "ton tonne",
        "ml mL milliliter millilitre", "cl", "dl", "l L liter litre", "gal gallon", "pt pint", "qt quart",
        "cup", "ms millisecond", "s sec second", "min minute", "h hr hour", "day", "week", "month",
        "yr year", "knot", "rpm", "Hz hertz", "kHz", "MHz", "N newton", "kN", "J joule", "kJ",
        "cal calorie", "kcal", "eV", "W watt", "kW", "MW", "kWh", "Pa pascal", "kPa", "atm", "bar",
        "V volt", "A amp ampere", "C coulomb", "Ω ohm", "T tesla", "K kelvin", "°C celsius Celsius",
        "°F fahrenheit Fahrenheit", "mol mole", "rad radian", "bit", "byte", "kB KB", "MB", "GB", "dozen",
        "$ dollar usd USD", "cent ¢", "€ euro EUR", "£ GBP", "¥ yen", "₹ rupee",
    )
    for name in names.split()
}  # fmt: skip
_CURRENCY = "$€£¥¢"
_FILLERS = {
    "a", "all", "altogether", "about", "approximately", "at", "away", "degree", "degrees", "during",
    "each", "every", "exactly", "extra", "for", "from", "if", "in", "is", "left", "long", "more", "of",
    "old", "on", "only", "per", "remaining", "so", "tall", "than", "that", "the", "there", "total",
    "to", "unit", "units", "when", "which", "who", "wide",
}  # fmt: skip
"""Words that are neither units nor counted things. The words after them are no units either."""


def _digits_with_unit(text: str) -> Quantity | None:
    text, unit, percent = _without_unit(text)
    number = _number(text)
    return None if number is None else Quantity(number, percent, unit)


_UNIT_IN_FONT = re.compile(FONT + r"([^{}]*)\}\s*(\^\s*\{?-?\d\}?)?$")
_UNIT = r"[a-zA-Z]+\.?(?: ?\^ ?\{?-?\d\}?)?"
_UNIT_WORD = re.compile(rf"(?<=[\d}})])( ?)({_UNIT}(?:(?: ?/ ?| |-){_UNIT})*)$")
_PERCENT = re.compile(r" ?(?:percent|pct|percentage)(?: points?)?\b")


def _quantity(text: str) -> Quantity:
    """Read a number or expression, after removing unit, percent sign, degrees and currency."""
    text, unit, percent = _without_unit(text)
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        plain = re.sub(r"\^ ?(?:\\circ|\{ ?\\circ ?\})", "", text).strip()
        if plain != text and unit == Unit():
            unit = Unit(frozenset({("°", 1)}))
        text = plain
    number = _number(text)
    if number is not None:
        return Quantity(number, percent, unit)
    return Quantity(_expression(text), percent, unit)


def _expression(text: str) -> Expression:
    if not re.search(r"[\da-zA-Z]", text) or _UNWANTED_WORD.search(re.sub(FONT, r"\\text{", text)):
        raise Unreadable(f"not mathematics: {text[:80]!r}")
    expression = Expression(text)
    expression_value(expression)
    return expression


def _without_unit(text: str) -> tuple[str, Unit, bool]:
    """Return the text without its unit, the unit, and whether the value was a percentage."""
    unit = Unit()
    if text.endswith("%"):
        return text[:-1].strip(), Unit(), True
    while len(text) > 1 and text[0] in _CURRENCY:
        text, unit = text[1:].strip(), _unit(text[0])
    if len(text) > 2 and text[0] == "-" and text[1] in _CURRENCY:
        text, unit = "-" + text[2:].strip(), _unit(text[1])
    while len(text) > 1 and text[-1] in _CURRENCY:
        text, unit = text[:-1].strip(), _unit(text[-1])
    while (match := _UNIT_IN_FONT.search(text)) and match.start():
        if _PERCENT.match(match[1]):
            return text[: match.start()].strip(), Unit(), True
        text, unit = text[: match.start()].strip(), _unit(match[1] + (match[2] or ""))
    if (match := _UNIT_WORD.search(text)) and _number(text[: match.start()].strip()) is not None:
        if _PERCENT.match(match[2]):
            return text[: match.start()].strip(), Unit(), True
        candidate = _unit(match[2])
        glued = not match[1] and len(match[2]) == 1 and match[2].isupper()  # a variable, as in 3N
        if (candidate.powers and not glued) or (match[1] and len(match[2].split()[0]) > 2):
            text, unit = text[: match.start()].strip(), candidate
    return text, unit, False


def is_unit(word: str) -> bool:
    """Return whether a word is a unit of more than one letter (except `in`), or part of a unit, as `per`."""
    if word in ("per", "square", "cubic", "percent", "degrees", "units"):
        return True
    names = re.sub(r"\^\{?-?\d\}?", "", word).split("/")
    return len(word) > 1 and word != "in" and all(map(_unit_name, names))


def _unit_name(word: str) -> str:
    """Return a known unit's canonical form, else an empty text."""
    lower = word.lower()
    return next(
        (_UNITS[form] for form in (word, lower, lower.rstrip("s"), word.rstrip("s")) if form in _UNITS), ""
    )


_UNIT_PART = re.compile(r"\^? ?\{?(-?\d)\}?|/|°?[^\W\d_]+|[$€£¥¢]")


def _unit(text: str) -> Unit:
    """Read a unit: `km/h`, `square miles per hour`, `m s^{-2}`, `apples left`."""
    powers, nouns = dict[str, int](), set[str]()
    sign, power, last_unit = 1, 1, ""
    text = re.sub(r"\b(?:(mph)|kmh|kph)\b", lambda match: "mi/h" if match[1] else "km/h", text)
    for part in _UNIT_PART.finditer(text):
        word = part[0].rstrip(".")
        if part[1] or word in ("squared", "cubed"):
            if last_unit:
                powers[last_unit] += sign * (int(part[1] or {"squared": 2, "cubed": 3}[word]) - 1)
        elif word in ("/", "per"):
            sign = -1
        elif word.lower() in ("square", "sq", "cubic", "cu"):
            power = 2 if word.lower().startswith("sq") else 3
        elif name_of_unit := _unit_name(word):
            powers[name_of_unit] = powers.get(name_of_unit, 0) + sign * power
            power, last_unit = 1, name_of_unit
        elif powers or word.lower() in _FILLERS:
            if powers or nouns:
                break
        else:
            nouns.add(word.lower().rstrip("s"))
    return Unit(frozenset((name, power) for name, power in powers.items() if power), frozenset(nouns))


_MAX_DIGITS = 4300
"""Python refuses to read longer integers."""
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = re.compile(rf"([+-]?) ?({_DIGITS}?)(?:\.(\d*))?(?:[eE]([+-]?\d{{1,3}}))?$")
_SCIENTIFIC = re.compile(r"^([+-]? ?[\d.,]+) ?(?:\\times|\\cdot|x) ?10 ?\^ ?\{? ?([+-]?\d{1,3}) ?\}?$")
_FRACTION = re.compile(
    r"([+-]?) ?(?:(\d+)(?: ?(?=\\frac)| (?=\d)))?"
    r"(?:\\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(-?\d+) ?\}|(\d))|(\d+) ?/ ?(\d+))$"
)


def _number(text: str) -> Number | None:
    """Read a number that is written out: integer, decimal, fraction or mixed fraction."""
    if len(text) > _MAX_DIGITS:
        return None
    text = _SCIENTIFIC.sub(r"\1e\2", text)
    if match := _DECIMAL.match(text):
        sign, integer_part, places, exponent = match.groups()
        if integer_part or places:
            digits = (integer_part or "0").replace(",", "").replace(" ", "")
            power = int(exponent or 0)
            value = Fraction(int(digits + (places or ""))) * Fraction(10) ** (power - len(places or ""))
            num_places = max(0, len(places) - power) if places is not None else None
            return Number(-value if sign == "-" else value, num_places)
    if match := _FRACTION.match(text):
        # Top and bottom are in braces, or one digit each, or with a slash between them.
        sign, integer_part, *_ = match.groups()
        top, bottom = int(match[3] or match[4] or match[7]), int(match[5] or match[6] or match[8])
        if bottom == 0 or (integer_part and top < 0):
            return None
        value = Fraction(top, bottom) + int(integer_part or 0)
        return Number(-value if sign == "-" else value)
    return None


# Numbers first, because the thousands separator is a comma.
_READERS: tuple[Callable[[str], Value | None], ...] = (
    _digits_with_unit, _matrix, _list, _union, _membership, _brackets, _equation, _exclusion, _inequality,
    _plus_minus, _ratio, _based_integer,
)  # fmt: skip

# ------------------------------------------------------------------------------------------ equality


def equal(gold: Value, answer: Value) -> bool:
    """Return whether an answer's value is the expected one: `x = 5` equals `5`; a bare list of numbers equals
    a set of them in any order, or a tuple in the same order. Brackets of intervals must agree, as must names
    and units that both sides have."""
    if isinstance(gold, Assignment) and isinstance(answer, Assignment) and gold.name == answer.name:
        return equal(gold.value, answer.value)
    if isinstance(gold, Assignment | Equation) and isinstance(answer, Assignment | Equation):
        return _equal_equations(gold, answer)
    if isinstance(gold, Assignment):
        return equal(gold.value, answer)
    if isinstance(answer, Assignment):
        return equal(gold, answer.value)
    if isinstance(gold, Items) or isinstance(answer, Items):
        return _equal_items(_as_items(gold), _as_items(answer))
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        same_shape = [len(row) for row in gold.rows] == [len(row) for row in answer.rows]
        return same_shape and all(map(equal, sum(gold.rows, ()), sum(answer.rows, ())))
    if isinstance(gold, BasedInteger) or isinstance(answer, BasedInteger):
        return _equal_based_integers(gold, answer)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return _equal_quantities(gold, answer)
    return False


def _as_items(value: Value) -> Items:
    return value if isinstance(value, Items) else Items(",", (value,), "")


def _equal_items(gold: Items, answer: Items) -> bool:
    if gold.name and answer.name and gold.name != answer.name:
        return False
    openings = {gold.opening, answer.opening}
    if gold.opening != answer.opening or gold.closing != answer.closing:
        # A bare list stands for a set, for a tuple, or for a union of one.
        if (
            "," not in openings
            or not openings <= {",", "{", "(", "|"}
            or {gold.closing, answer.closing} & {"]"}
        ):
            return False
        if (gold.name or answer.name) and openings == {",", "("}:
            return False
    if len(gold.items) != len(answer.items):
        return False
    if gold.ordered or answer.ordered:
        return all(map(equal, gold.items, answer.items))
    remaining = list(answer.items)
    for item in gold.items:
        match = next((index for index, candidate in enumerate(remaining) if equal(item, candidate)), None)
        if match is None:
            return False
        del remaining[match]
    return True


def _equal_equations(gold: Assignment | Equation, answer: Assignment | Equation) -> bool:
    """Return whether two equations are the same, if rearranged and multiplied by a number other than 0."""
    first, second = _difference(gold), _difference(answer)
    if first is None or second is None or first.free_symbols != second.free_symbols:
        return False
    if type(gold) is not type(answer) and len(first.free_symbols) < 2:
        return False  # x = 5 is a solution, 2x = 10 is not
    first_terms, second_terms = first.as_coefficients_dict(), second.as_coefficients_dict()
    if first == 0 or first_terms.keys() != second_terms.keys():
        return False
    return len({first_terms[term] / second_terms[term] for term in first_terms}) == 1


def _difference(equation: Assignment | Equation) -> Any:
    """Return left side − right side, expanded; None if a side is no expression."""
    from sympy import Expr, expand, nsimplify

    if isinstance(equation, Equation):
        sides = equation.left, equation.right
    elif _VARIABLE.match(equation.name) and isinstance(equation.value, Quantity):
        sides = Expression(equation.name), equation.value.value
    else:
        return None
    left, right = map(expression_value, sides)
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return None
    return expand(nsimplify(left - right, rational=True))


def _equal_based_integers(gold: Value, answer: Value) -> bool:
    """Return whether the digits agree; one side may omit the base."""
    if isinstance(gold, BasedInteger) and isinstance(answer, BasedInteger):
        return gold == answer
    integer, value = (gold, answer) if isinstance(gold, BasedInteger) else (answer, gold)
    assert isinstance(integer, BasedInteger)
    digits = Quantity(Number(Fraction(int(integer.digits)))) if integer.digits.isdigit() else None
    return value == digits


def _equal_quantities(gold: Quantity, answer: Quantity) -> bool:
    if not gold.unit.agrees(answer.unit):
        return False
    if gold.percent != answer.percent:  # 50% is 0.5, or 50 where the question asks for percent
        percent, plain = (gold.value, answer.value) if gold.percent else (answer.value, gold.value)
        below_one = isinstance(plain, Number) and abs(plain.value) < 1
        return _equal_values(_hundredth(percent), plain) or (not below_one and _equal_values(percent, plain))
    return _equal_values(gold.value, answer.value)


def _hundredth(value: Number | Expression) -> Number | Expression:
    if isinstance(value, Number):
        return Number(value.value / 100, None if value.places is None else value.places + 2)
    return Expression(rf"\frac{{{value.latex}}}{{100}}")


def _equal_values(gold: Number | Expression, answer: Number | Expression) -> bool:
    if isinstance(gold, Number) and isinstance(answer, Number):
        return gold.value == answer.value or _is_rounded(gold, answer) or _is_rounded(answer, gold)
    if isinstance(gold, Expression) and isinstance(answer, Expression) and gold.latex == answer.latex:
        return True
    from math_verify import verify

    a, b = expression_value(gold), expression_value(answer)
    if _is_constant(a) and _is_constant(b):
        return _equal_constants(gold, answer)
    return bool(verify(a, b, timeout_seconds=0))


_SIGNIFICANT = 6
"""Significant digits that a decimal needs to equal a number that it rounds."""


def _is_rounded(short: Number, long: Number) -> bool:
    """Return whether a decimal is another number rounded, or cut off, to at least six significant digits."""
    places = short.places
    if places is None or (long.places is not None and long.places <= places):
        return False
    unit = Fraction(1, 10**places)
    if abs(short.value) < unit * 10 ** (_SIGNIFICANT - 1):
        return False
    truncated = int(long.value / unit) * unit
    return short.value in (round(long.value, places), truncated)


def _is_constant(value: Any) -> bool:
    from sympy import Expr

    return isinstance(value, Expr) and not value.free_symbols and value.is_finite is not False


def _equal_constants(gold: Number | Expression, answer: Number | Expression) -> bool:
    """Compare two constants to 30 digits. A decimal may be the rounded value of the other constant."""
    first, second = (complex_value(value) for value in (gold, answer))
    if any(isinstance(value, Number) for value in (gold, answer)):
        number, other = (gold, second) if isinstance(gold, Number) else (answer, first)
        assert isinstance(number, Number)
        if number.places is not None and other[1] == 0:
            return _is_rounded(number, Number(other[0])) or other[0] == number.value
    size = max(abs(part) for value in (first, second) for part in value)
    return all(abs(a - b) <= size / 10**25 for a, b in zip(first, second, strict=True))


def complex_value(value: Number | Expression) -> tuple[Fraction, Fraction]:
    """Return real and imaginary part to 30 digits."""
    if isinstance(value, Number):
        return value.value, Fraction(0)
    from sympy import Mul, UnevaluatedExpr

    plain = expression_value(value).replace(UnevaluatedExpr, Mul)  # a percent sign is one, of 1/100
    real, imaginary = plain.evalf(30, maxn=100).as_real_imag()
    return tuple(Fraction(str(part)) for part in (real, imaginary))  # type: ignore[return-value]


def expression_value(value: Number | Expression) -> Any:
    """Return the value as a SymPy expression."""
    if isinstance(value, Number):
        from sympy import Rational

        return Rational(value.value.numerator, value.value.denominator)
    return _parse(value.latex)


@cache
def _parse(latex: str) -> Any:
    from math_verify import LatexExtractionConfig, parse
    from sympy import I

    degrees = r"(\d+(?:\.\d+)?)\^ ?(?:\\circ|\{ ?\\circ ?\})"
    text = re.sub(degrees, r"\\left(\\frac{\1\\pi}{180}\\right)", latex).replace("$", "")
    results = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=0)
    if not results:
        raise Unreadable(f"not mathematics: {latex[:80]!r}")
    value = results[0]
    return value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})


# -------------------------------------------------------------------------------------------- braces


def _depths(text: str, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (position, bracket depth after it) from `start` on. Any kind closes any other: `[0, 1)`."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth -= 1
        yield position, depth


def _matching(text: str, start: int) -> int:
    """Return the position of the bracket that closes the bracket at `start`; -1 if none does."""
    return next((position for position, depth in _depths(text, start) if depth == 0), -1)


def _split(text: str, separator: re.Pattern[str], *, keep: bool = False) -> list[str]:
    """Split at separators outside of brackets and environments; with `keep` return the separators too."""
    if not separator.search(text):
        return [text]
    outside = [depth == 0 for _, depth in _depths(text)]
    for environment in re.finditer(r"\\begin\{(\w+)\}", text):
        end = text.find(rf"\end{{{environment[1]}}}", environment.end())
        for position in range(environment.start(), end if end >= 0 else len(text)):
            outside[position] = False
    parts, start = list[str](), 0
    for match in separator.finditer(text):
        if outside[match.start()]:
            parts += [text[start : match.start()], *([match[0]] if keep else [])]
            start = match.end()
    return [*parts, text[start:]]
