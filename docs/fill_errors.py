"""Write the tables of docs/troubleshooting.md from the source: `python docs/fill_errors.py`.

Each table stands between `<!-- errors: PATTERN … -->` and `<!-- end -->`. It lists the messages of the errors
that the files of these patterns raise; a file belongs to the first part that matches it. The column with what
to do is written by hand: a message that stays keeps its text, and a new one has an empty cell. A test fails
if filling would change the page, or if a cell is empty.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("troubleshooting.md")
PART = re.compile(r"(<!-- errors: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
ROW = re.compile(r"^\| `` (.+?) `` \| (.*?) \|$", re.MULTILINE)

ERRORS = {
    *("BusError", "ConfigError", "ContractError", "EngineError", "LaunchError", "PluginError"),
    *("RequestError", "RewardError", "RunError", "StrettoError", "WeightsError"),
}
"""Exceptions that end a command or a run, with the message as first argument."""
PLACED = {"Problem", "error"}
"""Calls with the key of the run file as first argument, and the message as second."""
ENDS = {"drain", "end"}
"""Methods that end a run: with the status `failed` as first argument, and the reason as second."""
GIVE_UP = {"Fail", "_give_up"}
"""What ends a run or a tracker, with the reason as first argument."""


def filled(page: str) -> str:
    """The page with the table of every part as it should be."""
    known = dict(ROW.findall(page))
    left = sources()

    def part(match: re.Match[str]) -> str:
        own = [path for path in left if any(path.match(pattern) for pattern in match[2].split())]
        left[:] = [path for path in left if path not in own]
        messages = sorted({message for path in own for message in messages_of(path)}, key=str.lower)
        rows = [f"| `` {message} `` | {known.get(message, '')} |" for message in messages]
        return match[1] + "\n".join(["| message | what to do |", "|---|---|", *rows]) + "\n" + match[3]

    text = PART.sub(part, page)
    assert not left, f"no part of {PAGE.name} is about {left}"
    return text


def sources() -> list[Path]:
    """The files that raise errors of the command line, relative to the checkout."""
    files = sorted([*ROOT.glob("core/stretto/**/*.py"), *ROOT.glob("plugins/*/*/**/*.py")])
    relative = [path.relative_to(ROOT) for path in files if not {"simulation", "testing"} & {*path.parts}]
    return [path for path in relative if any(messages_of(path))]


def messages_of(path: Path) -> Iterator[str]:
    """The messages in one file, with `…` in place of values."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    returned = {function.name: function for function in functions}
    for function in functions:
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            key, message = message_of(call, function.name)
            for text in texts_of(message, function, returned) if message else ():
                yield re.sub(r"\s+", " ", f"{key}{text}").replace("|", "\\|").strip()


def message_of(call: ast.Call, function: str) -> tuple[str, ast.expr | None]:
    """The key that an error is about, as `steps: `, and its message; None if the call makes no error."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    first, second = ([*call.args, None, None])[:2]
    if name in ERRORS or name in GIVE_UP or (name == "ValueError" and function == "__post_init__"):
        return "", first
    if name == "__init__" and isinstance(first, ast.JoinedStr):
        return "", first  # an exception that makes its own message
    if name in ENDS and isinstance(first, ast.Constant) and first.value == "failed":
        return "", second
    if name in PLACED and second is not None:
        key = next(iter(texts(first)), "…") if first else ""
        return (f"{key}: " if key else ""), second
    return "", None


def texts_of(message: ast.expr, function: ast.AST, returned: Mapping[str, ast.AST]) -> list[str]:
    """What a message can be. Of a variable: what the function assigns to it. Of a call: what it returns."""
    if isinstance(message, ast.Name):
        values = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == message.id for target in node.targets)
        ]
        return [text for value in values for text in texts(value)]
    if isinstance(message, ast.Call) and isinstance(message.func, ast.Name) and message.func.id in returned:
        ends = [node for node in ast.walk(returned[message.func.id]) if isinstance(node, ast.Return)]
        return [text for end in ends if end.value for text in texts(end.value)]
    return texts(message)


def texts(value: ast.expr) -> list[str]:
    """The texts that an expression can be, with `…` for what only a run knows."""
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "…" for each in value.values]
        text = "".join(map(str, parts))
        return [text] if re.search(r"\w", text) else []
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        lefts, rights = texts(value.left) or ["…"], texts(value.right) or ["…"]
        return [left + right for left in lefts for right in rights]
    if isinstance(value, ast.IfExp):
        return texts(value.body) + texts(value.orelse)
    return []


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
