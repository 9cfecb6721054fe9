"""Chat templates of our own, each with a tokenizer, that have the traits of real ones."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ("<x>", "<e>", "<r>", "<b>", "<u>", "<a>", "<o>", "<c>", "<m>", "<k>", "<i>", "</i>")
"""Document end, turn end, role, begin of text, three roles, channel, message, call, instruction."""
ADDED = ("<think>", "</think>")
"""Tokens that are not special."""


@dataclass
class Form:
    """A template, its tokenizer, and what its chat form is to be."""

    template: Any
    eos: str = "<e>"
    ends: tuple[str, ...] = ()  # `eos_token_id` of the generation config; empty for `eos` alone
    closing: str = "<e>"  # what ends the last turn
    call_closing: str = ""  # what ends a last turn with calls, if it differs
    opened: str = ""
    lead: str = ""  # what the policy samples before the content
    tail: str = ""  # and after it, before the end
    final: str = ""  # what stands behind the last turn only, if no answer is opened
    merges: tuple[tuple[str, str], ...] = (("Ċ", "Ċ"), ("s", "Ċ"), ("t", "Ċ"), ("o", "k"))
    """Some cross a boundary that the template makes."""
    bos: bool = False
    sentence_piece: str = ""
    """Metaspace's `prepend_scheme`, or `llama` for a normaliser in its place; empty for a byte-level
    tokenizer."""
    prefixes: bool = False  # whether a byte-level tokenizer puts a space before a text
    unigram: bool = False
    """Whether the tokenizer finds whole pieces in a text, also those of special tokens."""
    rstrips: bool = False  # whether special tokens take the white space behind them
    content: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Of the roles whose content is not text alone."""
    arguments: str = "mapping"
    call_content: str | None = ""
    shows_tools: bool = True
    shows_calls: bool = True
    system: str = "shown"
    keeps: bool = True
    """Whether the rendering of a chat begins with those of its beginnings, if no turn has reasoning."""
    strips: bool = False  # whether the template drops white space at the end of an answer
    think: bool = False  # whether answers have reasoning
    given: dict[str, Any] = field(default_factory=dict[str, Any])  # arguments of the template
    sft: str = ""  # why supervised rows of several turns are refused; empty if they are not

    def __post_init__(self) -> None:
        self.ends = self.ends or (self.eos,)


_TOOLS = "{% if tools %}{{ '<r>tools\n' + tools | tojson + '<e>\n' }}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + CALL + '</tool_call>' }}{% endfor %}"
_AS_JSON = _CALLS.replace("CALL", "c.function | tojson")
_QUOTED = _CALLS.replace("CALL", "c.function.name + ':' + c.function.arguments | tojson")
_JOINED = _CALLS.replace("CALL", "c.function.name + ':' + c.function.arguments")
_KEYS = _CALLS.replace(
    "{{ '<tool_call>' + CALL + '</tool_call>' }}",
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}",
)
_LAST = "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"

_PARTS = {"[JSON]": _AS_JSON, "[JOINED]": _JOINED, "[KEYS]": _KEYS, "[LAST]": _LAST}
"""What stands in a turn for calls, and for the content without its reasoning."""


def _turns(turn: str, before: str = "", opening: str = "<r>assistant\n") -> str:
    for name, part in _PARTS.items():
        turn = turn.replace(name, part)
    opens = f"{{% if add_generation_prompt %}}{{{{ '{opening}' }}}}{{% endif %}}" if opening else ""
    return f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{opens}"


_PLAIN_TURNS = _turns("{{ '<r>' + m.role + '\n' }}CONTENT[JSON]{{ '<e>\n' }}", _TOOLS)
_NAMED = "{{ '<r>' + m.role + '\n' + m.content }}"
_ANSWERS = "{{ m.content + ('\nAnswer: ' if m.role == 'user' else '<e>\n') }}"


def _raising(test: str, reason: str) -> str:
    return f"{{% if {test} %}}{{{{ raise_exception('{reason}') }}}}{{% endif %}}"


_ARGUMENTS = "c.function.arguments"
_WRITTEN = _JOINED.replace(_ARGUMENTS, f"({_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson)")
_ROLE = "('user' if m.role == 'tool' else m.role)"
_LINES = _turns(
    "{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    f"{{{{ '<r>' + {_ROLE} + '\n' + m.content }}}}" + _QUOTED + "{{ '<e>\n' }}{% endif %}",
    "{% if messages[0].role != 'system' %}{{ '<r>system\nBe kind.<e>\n' }}{% endif %}" + _TOOLS,
)
_WORDS = _turns("{{ m.role + ':\n' + m.content }}[JSON]{{ '<x>\n' }}", _TOOLS, "assistant:\n")

_X: dict[str, Any] = {"eos": "<x>", "closing": "<x>"}
_TOOLLESS: dict[str, Any] = {"shows_tools": False, "shows_calls": False}
_ENDS_ALONE = "does not end it as the policy would"
_OPENS: dict[str, Any] = {"keeps": False, "sft": "opens the answer with"}
_THINKS: dict[str, Any] = {**_OPENS, "think": True}

_WRITTEN_FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain lines": (_LINES, {}),
    "wrong eos": (
        _LINES.replace(_ROLE, f"('<a>' if m.role == 'assistant' else '<r>' + {_ROLE})")
        .replace("'<r>' + ('<a>'", "('<a>'")
        .replace("<r>assistant\n", "<a>"),
        {"eos": "<x>", "lead": "\n"},
    ),
    "thinker by switch": (
        _turns(
            "{{ '<r>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + "
            "(m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '') "
            "+ '\n</think>\n\n' }}{% endif %}[LAST][JSON]{{ '<e>\n' }}",
            _TOOLS,
            "<r>assistant\n<think>\n\n</think>\n\n",
        ).replace(
            "{{ '<r>assistant\n<think>\n\n</think>\n\n' }}",
            "{{ '<r>assistant\n' }}"
            "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
        ),
        {**_OPENS, "given": {"enable_thinking": False}, "opened": "<think>\n\n</think>\n\n"},
    ),
    "opened thinker": (
        _turns(
            _raising("m.role == 'system' and not loop.first", "late system")
            + _raising("m.role not in ('system', 'user', 'assistant', 'tool')", "unknown role")
            + "{{ '<r>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' }}"
            "{{ m.content.strip() }}{% else %}{{ (m.content.split('</think>')[-1]).strip() }}{% endif %}"
            "[KEYS]{{ '<e>\n' }}",
            _raising("messages | selectattr('role', 'eq', 'user') | list | length == 0", "no user") + _TOOLS,
            "<r>assistant\n<think>\n",
        ),
        {**_THINKS, "opened": "<think>\n"},
    ),
    "forced thinker": (
        _turns(
            "{{ '<r>' + m.role + '\n' }}{% if m.content is none %}[JOINED]{% else %}[LAST]{% endif %}"
            "{{ '<e>\n' }}",
            "<b>" + _TOOLS,
            "<r>assistant\n<think>\n",
        ),
        {**_THINKS, "opened": "<think>\n", "bos": True, "arguments": "text", "call_content": None},
    ),
    "lone closer": (
        _turns(
            "{% if m.role == 'user' %}{{ '<u>' + m.content }}"
            "{% elif m.role == 'tool' %}{{ '<o>' + m.content }}"
            "{% elif m.role == 'system' %}{{ m.content }}"
            "{% else %}{{ '<a></think>' }}[LAST][JSON]{% endif %}",
            "{% if tools %}{{ tools | tojson }}{% endif %}",
            "<a><think>",
        ),
        {"eos": "<x>", "ends": ("<x>", "<u>", "<o>"), "closing": "<u>", "call_closing": "<o>"}
        | {**_THINKS, "opened": "<think>"},
    ),
    "dated header": (
        _turns(
            _raising("m.tool_calls is defined and m.tool_calls | length != 1", "one call")
            + "{{ '<r>' + m.role + '\n\n' }}"
            "{{ m.content | tojson if m.role == 'tool' else m.content.strip() }}"
            "[JSON]{% if tools and loop.first %}{{ tools | tojson }}{% endif %}{{ '<e>' }}",
            "<b>{{ '<r>system\n\nToday: ' + strftime_now('%d %b %Y') + '<e>' }}",
            "<r>assistant\n\n",
        ),
        {"ends": ("<x>", "<e>", "<k>"), "bos": True, "strips": True, "given": {"strftime_now": "2026-07-26"}},
    ),
    "strict alternation": (
        _turns(
            "{% if m.role == 'system' %}{% else %}"
            + _raising("m.role not in ('user', 'assistant')", "no tools")
            + _raising("(m.role == 'user') != ((loop.index0 - offset) % 2 == 0)", "alternate")
            + "{{ '<r>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}"
            "{% if offset and loop.index0 == 1 %}{{ messages[0].content + '\n\n' }}{% endif %}"
            "{{ m.content.strip() }}{{ '<e>\n' }}{% endif %}",
            "<b>{% set offset = 1 if messages[0].role == 'system' else 0 %}",
            "<r>model\n",
        ),
        {**_TOOLLESS, "eos": "<x>", "ends": ("<x>", "<e>"), "bos": True, "strips": True},
    ),
    "late system": (
        _turns(
            "{% if m.role == 'user' %}{{ '<i>' }}{% if loop.index0 == ns.last %}"
            "{% if tools %}{{ tools | tojson }}{% endif %}"
            "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}{% endif %}"
            "{{ m.content + '</i>' }}{% elif m.role == 'assistant' %}{{ m.content }}[JSON]{{ '<x>' }}"
            "{% elif m.role == 'tool' %}"
            + _raising("(m.tool_call_id or '') | length != 9", "nine letters")
            + "{{ '<o>' + m.content }}{% endif %}",
            "<b>{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
            "",
        ),
        {**_X, "bos": True, "sentence_piece": "first"},
    ),
    "last turn differs": (
        _turns(
            "{{ ('\n' if not loop.first else '') + '<r>' + m.role + '\n' + m.content }}"
            "[JSON]{{ '<x>' if loop.last and m.role == 'assistant' else '<e>' }}",
            _TOOLS,
            "\n<r>assistant\n",
        ),
        {**_X, "keeps": False, "sft": _ENDS_ALONE},
    ),
    "channels": (
        _turns(
            _raising("'<m>' in m.content", "channels inside")
            + "{% if m.thinking and (loop.last or m.tool_calls) %}"
            "{{ '<r>assistant<c>analysis<m>' + m.thinking + '<e>' }}{% endif %}"
            "{{ '<r>' + m.role }}{% if m.role == 'assistant' %}{% for c in (m.tool_calls or [])[:1] %}"
            "{{ '<c>to=' + c.function.name + '<m>' + c.function.arguments | tojson + '<k>' }}{% else %}"
            "{{ '<c>final<m>' + m.content + ('<x>' if loop.last else '<e>') }}{% endfor %}"
            "{% else %}{{ '<m>' + m.content + '<e>' }}{% endif %}",
            _TOOLS,
            "<r>assistant",
        ),
        {
            **_X,
            "ends": ("<x>", "<k>"),
            "call_closing": "<k>",
            "lead": "<c>final<m>",
            "keeps": False,
            "sft": _ENDS_ALONE,
        },
    ),
    "open turn": (
        _turns(
            "{% if m.role == 'tool' %}{{ '<o>' + m.content + '<o>' }}{% else %}"
            "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<r>' + m.role + '\n' }}"
            "{% endif %}{{ m.content.strip() }}[KEYS]{% if '<tool_call>' not in m.content "
            "and not m.tool_calls %}{{ '<e>\n' }}{% endif %}{% endif %}",
            _TOOLS,
        ).replace(
            "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1].role != 'tool' %}"
        ),
        {"eos": "<x>", "ends": ("<x>", "<e>", "<k>"), "strips": True},
    ),
    "counting ids": (
        _turns(
            "{{ '<r>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}"
            "[LAST][JSON]{{ '<e>' if m.role == 'tool' else '<e>\n' }}",
            _TOOLS,
        ),
        {"keeps": False},
    ),
    "words for headers": (_WORDS, {**_X, "sentence_piece": "always"}),
    "closer in words": (
        _turns(f"{_NAMED}[JSON]{{{{ '</answer>' if m.role == 'assistant' }}}}{{{{ '<e>\n' }}}}", _TOOLS),
        {"eos": "<x>", "tail": "</answer>"},
    ),
    "words alone close": (
        _turns("{{ m.role + ': ' + m.content }}[JSON]{{ '\n### End\n' }}", _TOOLS, "assistant: "),
        {**_X, "tail": "\n### End", "keeps": False},
    ),
    "tokens that strip": (
        _turns(_NAMED + "[JSON]{{ '<e>\n' }}", _TOOLS),
        {"sentence_piece": "always", "rstrips": True},
    ),
    "line before the text": (
        _turns("{{ ('<a>' if m.role == 'assistant' else '<u>') + '\n ' + m.content }}[JSON]", _TOOLS, "<a>"),
        {"eos": "<x>", "ends": ("<x>", "<u>"), "closing": "<u>", "lead": "\n ", "sentence_piece": "llama"},
    ),
    "space before a text": (
        _WORDS,
        {**_X, "prefixes": True, "merges": (("a", "o"), ("Ġ", "Ċ"), ("o", "k"), ("Ġ", "ok"))},
    ),
    "roles alone": (
        _turns("{{ ('<a>' if m.role == 'assistant' else '<u>') + m.content }}[JSON]", _TOOLS, "<a>"),
        {**_X, "keeps": False},
    ),
    "brackets": (
        _turns(
            "{% if m.role == 'assistant' %}{{ ' ' + m.content.strip() + '<x>' }}"
            "{% else %}{{ '<i>' + m.content + '</i>' }}{% endif %}",
            opening="",
        ),
        {**_X, **_TOOLLESS, "lead": " ", "sentence_piece": "first", "strips": True},
    ),
    "pieces": (_LINES, {"sentence_piece": "first", "unigram": True}),
    "end on a line": (
        _turns("{{ '<r>' + m.role + '\n' + m.content + '\n<e>\n' }}"),
        {**_TOOLLESS, "tail": "\n"},
    ),
    "marked answer": (
        _turns(
            "{{ '<r>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ '<c>' + m.content | trim + "
            "'<k>\n' }}[JSON]{% else %}{{ m.content }}{% endif %}{{ '<e>\n' }}",
            _TOOLS,
        ),
        {"lead": "<c>", "tail": "<k>\n", "strips": True},
    ),
    "framed last answer": (
        _turns(
            "{{ '<r>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<answer>\n' + "
            "m.content | trim + '\n</answer>' }}{% else %}{{ m.content }}{% endif %}[JSON]{{ '<e>\n' }}",
            _TOOLS,
        ),
        {"lead": "<answer>\n", "tail": "\n</answer>", "strips": True, "keeps": False, "sft": "changes it"},
    ),
    "placeholder for reasoning": (
        _turns(
            "{{ '<r>' + m.role + '\n' }}{% if m.role == 'assistant' and not loop.last %}<think>none</think>"
            "{% endif %}{{ m.content }}[JSON]{{ '<e>\n' }}",
            _TOOLS,
        ),
        {"keeps": False, "sft": "changes it"},
    ),
    "end of the chat": (
        _LINES.removesuffix("{% endif %}") + "{% else %}<x>{% endif %}",
        {"eos": "<x>", "final": "<x>"},
    ),
    "calls as they are": (_LINES.replace(_QUOTED, _WRITTEN), {"arguments": "mapping or text"}),
    "parts of the user": (
        _PLAIN_TURNS.replace(
            "CONTENT",
            "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}",
        ),
        {"content": {"user": {"parts"}}},
    ),
    "text or parts": (
        _PLAIN_TURNS.replace(
            "CONTENT",
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{{ '' if loop.first else '; ' }}{{ '[' + p.thinking + ']' if p.type == 'thinking' else p.text }}"
            "{% endfor %}{% endif %}",
        ),
        {
            "content": {
                **{role: {"text", "parts"} for role in ("system", "user", "tool")},
                "assistant": {"text", "parts", "thinking"},
            }
        },
    ),
    "no header for answers": (
        {
            "default": _turns(_ANSWERS, opening=""),
            "tool_use": _turns(_ANSWERS, "{{ tools | tojson + '\n' }}", ""),
        },
        {"eos": "<x>", "shows_calls": False, "merges": (("Ġ", "o"), ("o", "k"))},
    ),
}
"""Name -> template, and what else is not as usual."""
FORMS = {name: Form(template, **options) for name, (template, options) in _WRITTEN_FORMS.items()}


def write_model(form: Form, folder: Path) -> str:
    """Write tokenizer, template and generation config of a form into a folder, and return the folder."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(form.merges)
    if form.sentence_piece:
        pieces = ["▁", *(piece for piece in pieces if piece not in "▁")]
        merges = [("▁", "o"), ("o", "k")]
    tokens = [*SPECIAL, *pieces, *(a + b for a, b in merges), "\n", "é"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if form.unigram:
        backend = Tokenizer(models.Unigram([(token, -10.0 / len(token)) for token in vocab], unk_id=0))
    if form.sentence_piece == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif form.sentence_piece:
        scheme: Any = form.sentence_piece
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=form.prefixes, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True, rstrip=form.rstrips) for each in SPECIAL])
    backend.add_tokens([AddedToken(each, special=False) for each in ADDED])
    if form.bos:
        token = backend.token_to_id("<b>")
        backend.post_processor = processors.TemplateProcessing("<b> $A", "<b> $A <b> $B", [("<b>", token)])
    others = [each for each in SPECIAL if each != form.eos]
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=form.eos, pad_token=form.eos, additional_special_tokens=others
    )
    fast.chat_template = form.template
    fast.save_pretrained(folder)
    ends = [backend.token_to_id(end) for end in form.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return str(folder)


def write_weights(form: Form, folder: Path) -> Path:
    vocabulary = len(PreTrainedTokenizerFast.from_pretrained(write_model(form, folder)))
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=32, intermediate_size=32, **sizes)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)
    return folder
