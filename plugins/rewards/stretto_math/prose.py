"""Rewrite the notations of prose to those that `values` reads, and find values between words."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from stretto_math.values import FRACTIONS, is_unit

ENVIRONMENT = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+?)(?<!\\)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL
)

_MARK = r"\\(?:overline|bar|dot) ?"
_POINT = r"(?<![\d.])(\d{0,20})\.(\d{0,40})"
_REPEATING = re.compile(
    rf"{_POINT}(?:{_MARK}(?:\{{ ?(\d{{1,40}}) ?\}}|(\d))(?:(\d{{0,40}}){_MARK}(?:\{{(\d)\}}|(\d)))?"
    r"|\((\d{1,40})\)(?![\d(^]))"
)
_ELLIPSIS = re.compile(rf"{_POINT}(?:\.\.\.|…|\\[lc]?dots(?![a-z]))")
_PERIOD = re.compile(r"(\d)\1\1+$|(\d{2,12}?)\2+$")
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_EMPTY = "(?:(?:the|an) )?(?:empty|null) set"
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_RAISED = str.maketrans(_SUPERSCRIPTS, "0123456789+-n")
_NOTATIONS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(f"[{_SUPERSCRIPTS}]{{1,40}}"), lambda match: f"^{{{match[0].translate(_RAISED)}}}"),
    (re.compile("<answer>"), "#### "),
    (re.compile("</answer>"), "\n"),
    (re.compile(r"[−‒–﹣－‐‑]"), "-"),
    (re.compile(r"(?<![^\s(=$*])—(?=[\d.$])"), "-"),
    (re.compile(r"\b(?:negative|minus) (?=[\d.$\\])", re.IGNORECASE), "-"),
    (re.compile("—"), " — "),
    (re.compile(rf"\\text\{{ ?{_EMPTY} ?\}}|\b{_EMPTY}\b", re.IGNORECASE), "∅"),
    (re.compile(r"(?<=\d)[\u0304\u0305](?=(?:\d[\u0304\u0305])?)"), "\u0305"),
)


def plain_notation(text: str) -> str:
    """Return a text with one kind of minus sign, fractions for repeating decimals, digits for "million" and
    the like, and `∅` for "the empty set"."""
    for pattern, new in _NOTATIONS:
        text = pattern.sub(new, text)
    text = re.sub(r"(?:\d\u0305){1,40}", lambda match: rf"\overline{{{match[0][::2]}}}", text)
    text = _REPEATING.sub(_fraction, text)
    text = _ELLIPSIS.sub(_continued, text)
    return re.sub(
        rf"(?<=\d) ?\\?,? ?(?:\\text\{{ ?)?({'|'.join(_POWERS)})\b(?: ?\}})?",
        lambda match: f"e{_POWERS[match[1].lower()]}",
        text,
        flags=re.IGNORECASE,
    )


def _fraction(match: re.Match[str]) -> str:
    whole, places, block, digit, middle, end, last, round_block = match.groups()
    block = (block or digit or "") + (middle or "") + (end or last or "") + (round_block or "")
    return _latex(whole, places, block)


def _continued(match: re.Match[str]) -> str:
    """Return `0.1666...` as a fraction whose last block of digits repeats; other texts stay as they are."""
    whole, digits = match.groups()
    period = _PERIOD.search(digits)
    if period is None:
        return match[0]
    return _latex(whole, digits[: period.start()], period[1] or period[2])


def _latex(whole: str, places: str, block: str) -> str:
    value = Fraction(int(whole + places or "0"), 10 ** len(places))
    value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(places))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@dataclass(frozen=True)
class StatedValue:
    """A value that stands between words."""

    start: int
    text: str
    before: str
    """The text before the value, on the same line."""
    after: str

    @property
    def whole(self) -> bool:
        """Whether the words around the value leave it as it is, unlike "at least 5" and "twice 5"."""
        return not (_PREFIX.search(self.before) or _SUFFIX.match(self.after))


_PREFIX = re.compile(
    r"\b(?:at (?:least|most)|(?:less|more|greater|fewer|smaller|larger|higher|lower) than|between|from"
    r"|below|above|\d to|twice|double|triple|half(?: of)?"
    r"|(?:root|square|cube|third|quarter|multiple|power) of)\s*$",
    re.IGNORECASE,
)
_SUFFIX = re.compile(
    r"\s*(?:squared|cubed|plus|minus|divided|multiplied|times (?:\d|the|as|more)|to the power|in base"
    r"|or (?:more|less|fewer)|and a half|(?:less|more|greater|fewer|smaller|larger|higher|lower) than)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Token:
    start: int
    end: int
    text: str
    kind: str
    """`value`, `sign` (also letters and conjunctions), `unit`, or `word`."""


_TOKEN = re.compile(r"\n|\$?(?:(?!\\[(\[])[^\s$])+|\S")
_OPERATOR = r"[-+*/=<>≤≥≠±×·÷^≈∪∈|:!]|\\(?:le|ge|ne|lt|gt|leq|geq|neq|pm|times|cdot|approx|cup|in)(?![a-z])"
_SIGN = re.compile(rf"(?:{_OPERATOR}|[,;&()\[\]{{}}]|\\\\)+|and|or")
_VALUE = re.compile(
    rf"\d|[π√∞∅{FRACTIONS}]|\\[a-zA-Z{{]|infinity"
    r"|(?:sin|cos|tan|log|ln|exp) |[a-zA-Z)] ?[-+*/^=<>] ?[a-zA-Z(]"
)
_FUNCTION = re.compile(r"sqrt|pi|sin|cos|tan|log|ln|exp|infinity|mod")
_ORDINAL = re.compile(r"\d+(?:st|[nr]d|th)\b|\d+-[a-z]{2}", re.IGNORECASE)
_NEGATED = re.compile(r"(?:\b(?:is|are|was|be|equals?|to|by|of|get|gives|at)|^)[\s*]*$")
_END = re.compile(r"[.!?]$")


def results(text: str) -> Iterator[StatedValue]:
    """Yield the values in a text, each as long as possible: `9 * 2 = $18`, `(1, 2)`, `3 or 4`, `5 km/h`."""
    run: list[_Token] = []
    line = 0
    tokens = [*_tokens(text), _Token(len(text), len(text), "\n", "word")]
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        ends = following.text == "\n" or _END.search(token.text)
        after_value = run and run[-1].kind in ("value", "unit")
        if token.kind == "unit" and not after_value:
            token = replace(token, kind="value" if "^" in token.text else "word")
        is_noun = (
            ends
            and run
            and run[-1].kind == "value"
            and re.fullmatch(r"(?!squared|cubed)[a-z]{3,}\W?", token.text)
        )
        if is_noun:
            run.append(_Token(token.start, token.end, token.text, "unit"))
        elif token.kind == "word":
            yield from _result(text, line, run)
            run = []
        else:
            run.append(token)
            if _END.search(token.text):
                yield from _result(text, line, run)
                run = []
        if token.text == "\n":
            line = token.end


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while match := _TOKEN.search(text, position):
        formula = ENVIRONMENT.match(text, match.start())
        if formula and not _is_prose(formula[0]):
            yield _Token(formula.start(), formula.end(), formula[0], "value")
            position = formula.end()
            continue
        end = match.end()
        while text.count("{", match.start(), end) > text.count("}", match.start(), end):
            following = _TOKEN.search(text, end)
            if following is None or following[0] == "\n":
                break
            end = following.end()
        word = text[match.start() : end]
        yield _Token(match.start(), end, word, _kind(word))
        position = end


def _is_prose(formula: str) -> bool:
    plain = re.sub(r"\\[a-zA-Z]+\s*(?:\{[^{}]*\})?", " ", formula)
    plain = _FUNCTION.sub("", plain)
    return re.search(r"[a-zA-Z]{3,}", plain) is not None or len(re.findall(r"[a-zA-Z]{2,}", plain)) > 1


def _kind(word: str) -> str:
    bare = word.strip(".,;:!?'\"()[]")
    if _ORDINAL.match(bare):
        return "word"
    if _SIGN.fullmatch(word) or _SIGN.fullmatch(bare):
        return "sign"
    if is_unit(bare):
        return "unit"
    if re.search(rf"\d|[π√∞∅{FRACTIONS}]|\\[a-zA-Z{{]|^infinity$", bare):
        return "value"
    letters = _FUNCTION.sub("", bare)
    if re.search(r"[a-zA-Z]{2,}", letters) or not re.search("[a-zA-Z]", bare):
        return "word"
    return "sign" if len(bare) > 1 or bare not in "aAI" else "word"


def _result(text: str, line: int, run: list[_Token]) -> Iterator[StatedValue]:
    """Yield the value of a run of tokens, without conjunctions and single letters at its ends."""
    while run and (run[0].kind != "value" and not _opens(run)):
        run = run[1:]
    while (
        run
        and run[-1].kind == "sign"
        and (re.fullmatch(r"and|or|\W+", run[-1].text) and ")" not in run[-1].text)
    ):
        run = run[:-1]
    if run and run[0].text == "-" and not _NEGATED.search(text[line : run[0].start]):
        run = run[1:]
    if run and _VALUE.search(" ".join(token.text for token in run)):
        start = run[0].start
        units = next((index for index, token in enumerate(run) if token.kind == "unit"), len(run))
        if any(token.kind != "unit" for token in run[units:]):
            units = len(run)
        value = text[start : run[units - 1].end]
        value = _balanced(ENVIRONMENT.sub(lambda formula: "".join(filter(None, formula.groups())), value))
        if units < len(run):
            unit = re.sub(r"[{}]|\W+$", "", text[run[units].start : run[-1].end])
            value += rf" \text{{{unit}}}"
        yield StatedValue(start, value, text[line:start].rstrip(), text[run[-1].end :][:40])


def _opens(run: list[_Token]) -> bool:
    """Return whether a value may begin with the first token of a run: a letter, bracket or minus sign."""
    first = run[0].text
    if re.fullmatch(r"and|or|[,;:.=]+", first):
        return False
    following = run[1].text if len(run) > 1 else ""
    return not first.isalpha() or bool(_FUNCTION.match(first) or re.match(_OPERATOR, following))


def _balanced(text: str) -> str:
    """Remove punctuation around a value, and brackets that only open or only close."""
    text = re.sub(r"^[\"'`,;:?*_ ]+|[\"'`,;:?.*_ ]+$", "", text)
    opened, closed = len(re.findall(r"[(\[{]", text)), len(re.findall(r"[)\]}]", text))
    if opened > closed:
        text = text.removeprefix("(")
    if closed > opened:
        text = text.removesuffix(")")
    return text
