"""The reverse of mends by which real chat templates are read rightly, each with default tests that fail then.

As a plugin of pytest it plants the one whose number is in FORM_MUTATION.
"""

import os

from mutations import Mutation, plant

_CALLS, _CHATS, _FORM, _STORED = (
    f"stretto.chat.{name}" for name in ("calls", "chats", "chat_form", "stored")
)
_CHECK, _TOKENIZER = "stretto.cli.start.check_chat", "stretto.models.tokenizer"
_FORMS, _OF_CHECK = "tests/models/test_chat_forms.py", "tests/cli/test_check_chat.py"

_END = 'inner_end="" if added'
_ENDS, _BOTH_ENDS = (
    "({added[last_end]} if last_end else set())",
    "{added[each] for each in (last_end, turns.inner_end) if each}",
)
_ALSO_ENDS = Mutation("and it is an end", _FORM, _ENDS, _BOTH_ENDS)
_KEYS = '("text", "opened", *keys, "parts"), (False'
_EACH = 'each = enumerate(cast("list[Any]", value)'

FORM_MUTATIONS: list[tuple[Mutation, str]] = [
    (Mutation("reasoning goes back in text alone", _STORED, _KEYS, '("text",) * 3, (False'), _FORMS),
    (Mutation("no refusal", _CHECK, "and None in taken:", "and None is taken:"), _OF_CHECK),
    (Mutation("a history's tag is not opened", _FORM, "in (tag, thought) if", "in (tag,) if"), _FORMS),
    (Mutation("named formats alone", _CALLS, "if one and (derived", "if not one and (derived"), _FORMS),
    (Mutation("no engine stops at an end", _FORM, _END, f"{_END} or not added", (_ALSO_ENDS,)), _FORMS),
    (Mutation("two turns are one", _CHATS, "len(inside) > 1 and", "len(inside) > 9 and"), _FORMS),
    (Mutation("probes without tools", _FORM, "([A_TOOL], of_others)):", "(of_others,)):"), _FORMS),
    (Mutation("the first call counts", _CHATS, _EACH, f"{_EACH}[:1]"), _OF_CHECK),
    (Mutation("advice untried", _TOKENIZER, "return bool(write(turns, schemas))", "return True"), _FORMS),
]


def pytest_collection_finish() -> None:
    if number := os.environ.get("FORM_MUTATION"):
        plant(FORM_MUTATIONS[int(number)][0])
