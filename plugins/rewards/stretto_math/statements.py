"""Find the result that a text states: an expected answer, or a completion that reasons first."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stretto_math.prose import ENVIRONMENT, plain_notation, results
from stretto_math.values import FONT, Unreadable, Value, equal, read


@dataclass(frozen=True)
class Choices:
    """Letters of a multiple choice."""

    letters: frozenset[str]


@dataclass(frozen=True)
class Words:
    """A text that is compared as text, in its normal form."""

    text: str


Gold = Choices | Words | Value

_FONT = re.compile(FONT + r"([^{}]*)\}")
_SHORT_WORDS = {"no", "up", "on", "in", "ok", "am", "pm"}
_NOT_WORDS = {"pi", "sqrt", "infinity", "infty", "inf"}
_WORD = r"[A-Za-z][A-Za-z'’-]*"
_WORDS = re.compile(rf"({_WORD})(?:[ ,]+[A-Za-z0-9][A-Za-z0-9'’.-]*)*[.!]?$")
_LETTER = r"\(?(?<![A-Za-z])[A-J](?![A-Za-z'’]|[-–]\d)\)?"
_CHOICES = re.compile(rf"{_LETTER}(?:(?:\s*(?:,|;|/|and|or|&)\s*|\s+){_LETTER})*")
_REASON = re.compile(
    r"[-–—:=]|(?:because|since|as|for|due|by|which|where|with|while|whereas|thanks|so|not)\b"
    r"|is (?:the )?(?:correct|right|best|true|only|answer)\b"
)
"""Text after a letter which shows that the letter is a choice, and not the first word of a sentence."""

# ------------------------------------------------------------------------------------- expected answers


def read_gold(text: str) -> Gold:
    """Read a row's expected answer: bare, in `$…$`, in `\\boxed{}`, after `####`, or at a solution's end.
    Raise `Unreadable` if the text states no result."""
    text = plain_notation(text).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip()
    elif boxes := _boxes(text):
        text = boxes[-1].content
    text = _bare(text)
    plain = _plain(text)
    if letters := _choices(plain):
        return Choices(letters)
    match = _WORDS.match(plain)
    first_word = match[1].lower() if match else ""
    if _NAME.fullmatch(plain) or (
        first_word
        and first_word not in _NOT_WORDS
        and (len(first_word) > 2 or first_word in _SHORT_WORDS or _FONT.match(text))
    ):
        return Words(_normal(plain))
    return read(text)


def _bare(text: str) -> str:
    text = text.strip()
    match = ENVIRONMENT.fullmatch(text)
    if match and not (match[3] or match[4] or "").count("\\)"):
        return next(group for group in match.groups() if group is not None).strip()
    return text


def _plain(text: str) -> str:
    text = _FONT.sub(r" \1 ", text).replace("**", " ").replace("$", " ").replace("\\ ", " ")
    return re.sub(r"\s+", " ", text).strip(" .:;,\t\n*")


def _normal(text: str) -> str:
    words = re.sub(r"[^\w\s'’-]", " ", _plain(text).lower()).split()
    plain = " ".join(word for word in words if word not in ("a", "an", "the"))
    return plain.replace("solutions", "solution")


def _choices(plain: str) -> frozenset[str]:
    """Return the choice letters at the beginning of a text: `(B)`, `B. 12`, `A and C`."""
    match = _CHOICES.match(plain)
    if match is None:
        return frozenset()
    rest = plain[match.end() :].strip()
    letters = match[0].strip()
    is_choice = (
        not rest
        or letters.startswith("(")
        or letters.endswith(")")
        or rest[0] in ".):,"
        or _REASON.match(rest)
    )
    return frozenset(re.findall(r"[A-J]", match[0])) if is_choice else frozenset()


# ------------------------------------------------------------------------------------------ completions


@dataclass(frozen=True)
class _Statement:
    start: int
    end: int
    content: str
    final: bool
    """Whether earlier statements are ignored even if this one is unreadable; true for a box."""


def is_right(gold: Gold, completion: str) -> bool:
    """Return whether the last result that a completion states is the expected one."""
    completion = plain_notation(completion)
    if _OPEN_BOX.search(completion):  # the end of the answer cuts its result, and no earlier one counts
        return False
    for statement in _statements(completion):
        if _NOT.search(completion[max(0, statement.start - 40) : statement.start].rstrip(" $*(\\")):
            continue
        verdict = _verdict(gold, statement)
        if verdict is not None:
            if isinstance(gold, Choices | Words) or not _is_retracted(statement, completion):
                return verdict
            break
    return _tail_verdict(gold, completion[-_TAIL:])


def _is_retracted(statement: _Statement, completion: str) -> bool:
    return bool(_DENIAL.match(completion, statement.end) or _RETRACTION.search(completion, statement.start))


def _statements(completion: str) -> Iterator[_Statement]:
    """Yield the boxes and the texts after `####` or "the answer is", the last one first."""
    boxes = _join_boxes(_boxes(completion), completion)
    announcements = [
        statement
        for statement in _announcements(completion)
        if not any(box.start < statement.end and statement.start < box.end for box in boxes)
    ]
    yield from sorted([*boxes, *announcements], key=lambda statement: -statement.start)


def _boxes(text: str) -> list[_Statement]:
    """Return each `\\boxed{…}` that is closed and not empty; of nested boxes, the inner ones."""
    boxes: list[_Statement] = []
    for match in _BOX.finditer(text):
        end, depth = -1, 1
        for brace in _BRACE.finditer(text, match.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                end = brace.start()
                break
        if text[match.end() : end].strip() and end >= 0:
            boxes.append(_Statement(match.start(), end + 1, text[match.end() : end], final=True))
    return [box for box in boxes if not _BOX.search(box.content)]


_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_OPEN_BOX = re.compile(_BOX.pattern.replace(r"\{", r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*(?:\{[^{}]*)*$"))
_NAME = re.compile(r"\d{4}-\d\d?-\d\d?|v?\d+(\.\d+){2,}")  # a date, a version, an address: no arithmetic
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SEPARATOR = re.compile(r"[\s$,;]*(?:\\text\s*\{\s*)?(?:and|or)?[\s},;$]*")


def _join_boxes(boxes: list[_Statement], text: str) -> list[_Statement]:
    """Join adjacent boxes into one list: `\\boxed{1}` and `\\boxed{2}`."""
    lists: list[_Statement] = []
    for box in boxes:
        gap = text[lists[-1].end : box.start] if lists else "."
        if _SEPARATOR.fullmatch(gap) and "\n\n" not in gap:
            previous = lists.pop()
            box = _Statement(previous.start, box.end, f"{previous.content}, {box.content}", final=True)
        lists.append(box)
    return lists


_ANNOUNCEMENT = re.compile(
    r"(?:\b(?:answer|final result|option|choice)\b[^.\n:=]{0,40}?(?:\b(?:is|(?:must|should) be)\b|:|=)|####)"
    r"[\s:*]*",
    re.IGNORECASE,
)


def _announcements(completion: str) -> Iterator[_Statement]:
    for match in _ANNOUNCEMENT.finditer(completion):
        end = completion.find("\n", match.end())
        end = len(completion) if end < 0 else end
        yield _Statement(match.end(), end, completion[match.end() : end], final=False)


def _verdict(gold: Gold, statement: _Statement) -> bool | None:
    """Return whether a statement is right; None if it has no result of the expected kind and is ignored."""
    content = statement.content
    if not statement.final:
        filler = _FILLER.match(content)
        content = content[filler.end() :] if filler else content
    if isinstance(gold, Choices):
        return _letter_verdict(gold, content, final=statement.final)
    if isinstance(gold, Words):
        return _word_verdict(gold, content, final=statement.final)
    for text in [content] if statement.final else _readings(content):
        right = _states(text, gold)
        if right or (right is not None and not text.endswith("!")):  # an exclamation rather than a factorial
            return right
    return False if statement.final else None


def _states(text: str, gold: Value) -> bool | None:
    """Return whether a text is the expected value; None if it is not mathematics."""
    try:
        return equal(gold, read(_bare(text)))
    except Unreadable:
        return None


_FILLER = re.compile(
    r"(?:\s|\*|~|:|(?:therefore|thus|simply|just|exactly|approximately|about|equal to|equals|given by|option|"
    r"choice)\b)*",
    re.IGNORECASE,
)
_RETRACTION = re.compile(
    r"\b(?:that|this|it|which)(?:'s| is| was)(?:n't| not)? (?:right|correct|wrong|incorrect|a mistake)\b"
    r"|\b(?:it|that|this|answer|result|value) should (?:be|have been)\b"
    r"|[.!?\n]\s{0,3}(?:however|but|actually|wait|no|sorry|correction)\b[,:.!]?\s+"
    r"(?:it|that|this|the (?:[a-z]+ )?(?:answer|result|value|number))(?:'s| is| was| equals| must)\b",
    re.IGNORECASE,
)
"""Text after a result which may say that the result is wrong, or that another one is right."""
_DENIAL = re.compile(r"[\s$.,*)]{0,5}(?:is|was)(?:n't| not| wrong| incorrect)\b")
"""Text directly after a box which says that the result in the box is wrong."""


def _letter_verdict(gold: Choices, content: str, *, final: bool) -> bool | None:
    plain = _plain(content)
    letters = _choices(plain)
    if not letters and re.fullmatch(r"\(?[a-j]\)?", plain):
        letters = frozenset(plain.strip("()").upper())
    return letters == gold.letters if letters or final else None


def _word_verdict(gold: Words, content: str, *, final: bool) -> bool | None:
    words = _normal(content)
    if final or words == gold.text:
        return words == gold.text
    words = _normal(re.split(r"[.,;(!\n]| because | since | as ", content)[0])
    return words == gold.text if len(words.split()) <= 4 else None


_CLAUSE = re.compile(
    r"\.(?=\s|$)|,?\s(?:because|since|as|for|so|when|where|which|if|but|not|in|at|on|is|—)\s", re.IGNORECASE
)


def _readings(content: str) -> Iterator[str]:
    """Yield the candidate results in the rest of a line: its first formulas, first sentence, first value."""
    if match := ENVIRONMENT.match(content):
        formulas = [match]
        while following := ENVIRONMENT.search(content, formulas[-1].end()):
            if not _SEPARATOR.fullmatch(content[formulas[-1].end() : following.start()]):
                break
            formulas.append(following)
        yield ", ".join(_bare(formula[0]) for formula in formulas)
    first = next(results(content[:_TAIL]), None)
    if first and first.start == 0 and first.whole:
        yield _CLAUSE.split(content, maxsplit=1)[0].replace("**", " ").rstrip()
        yield first.text.rstrip("!")


_TAIL = 2000
"""Characters at the end of a completion that are searched for an unannounced result."""
_TAIL_LETTER = re.compile(
    r"(?<!not )(?:\b(?i:option|choice)\s+\(?([A-J])\b|\(([A-J])\)|\*\*\(?([A-J])\)?\*\*"
    r"|\b(?i:it is|it's|choose|pick|select|say|must be|go with|so|therefore|thus|hence),? ([A-J])"
    r"(?=\W*$|[.,;)]| (?:because|since|as)\b)"
    r"|\b([A-J])(?= (?:is|must be) (?:the )?(?:correct|right|best|true|answer)\b))"
    r"(?!\)? (?:fails?|(?:is|was) (?:not|wrong|incorrect|false|too))\b)",
    re.MULTILINE,
)
_NOT = re.compile(r"(?:\b(?:not|rather than|instead of)|n't)\s*$", re.IGNORECASE)
_NOT_THIS = re.compile(rf"{_NOT.pattern}|(?:\bnot|n't) (?:think|believe|say)\b[^.]*$", re.IGNORECASE)
_YES_OR_NO = re.compile(
    r"(?:^|[.!?:\n]|\b(?:so|thus|hence|therefore),?)\s*\**(yes|no|true|false)\b", re.IGNORECASE
)


def _tail_verdict(gold: Gold, tail: str) -> bool:
    """Return whether the last value between words is right; for letters and words, the last line."""
    last_line = tail.rstrip().rpartition("\n")[2]
    if isinstance(gold, Choices):
        letters = _choices(_plain(last_line))
        if not letters and (matches := list(_TAIL_LETTER.finditer(tail))):
            letters = frozenset(group for group in matches[-1].groups() if group)
        return letters == gold.letters
    if isinstance(gold, Words):
        sentence = re.split(r"[.!?]\s", last_line)[-1]
        if gold.text in (_normal(last_line), _normal(re.split(r"\b(?:is|are|was|were)\b", sentence)[-1])):
            return True
        words = [match[1].lower() for match in _YES_OR_NO.finditer(tail)]
        return gold.text in ("yes", "no", "true", "false") and words[-1:] == [gold.text]
    stated = [result for result in results(tail) if not _NOT_THIS.search(result.before)]
    if not stated or not stated[-1].whole:
        return False
    return any(_states(text, gold) for text in (stated[-1].text, stated[-1].text.rstrip("!")))
