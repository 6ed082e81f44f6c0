"""The tool calls of a reply, in the formats that models are trained on: JSON, tags, Python, or special tokens."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trueline.data.messages import Message

END_OF_THOUGHT = "</think>"
PYTHON_TAG, TOOL_CALLS, TAGS = "<|python_tag|>", "[TOOL_CALLS]", ("<tool_call>", "</tool_call>")
REMEDY = 'give one JSON object, {"name": "...", "arguments": {...}}'
BEGUN = re.compile(
    r'[\[\s]*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(arguments|parameters)"\s*:'
)
FENCE = re.compile(r"^[ \t]*```(?:json)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
LONGEST_QUOTE = 200  # characters
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = ("<parameter=", ">", "</parameter>")
ARGUMENT = ("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
PARTS = ("calls▁begin", "call▁begin", "call▁end", "sep")
CALLS, CALL, CALL_END, SEPARATOR = (f"<\uff5ctool▁{part}\uff5c>" for part in PARTS)
FENCED = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)
GEMMA, GEMMA_QUOTE = ("<|tool_call>", "<tool_call|>"), '<|"|>'
GEMMA_KEY = re.compile(r"(?<=[{,])\s*([^\s:,{}\[\]\"]+)\s*:")
FUNCTOOLS = "functools"
CHANNEL, BODY = "<|channel|>", "<|message|>"
MESSAGE = "<|start|>assistant"
ENDS = re.compile(r"<\|(?:end|call|return|eom|eot)\|>")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:-]+)")
INVOKED = re.compile(r'\s*name="([^"\n]+)">(.*)', re.DOTALL)
ATEM_PARAMETER = ('<atem:parameter name="', '">', "</atem:parameter>")
ATEM_CALLS = re.compile(r"</?atem:function_calls>")
JSON_NAMES = {"true": True, "false": False, "null": None}
REMEDIES = {  # what a policy is to write instead of a call that cannot be read, by format
    "qwen3_coder": f"write {TAGS[0]}<function=NAME><parameter=ONE>VALUE</parameter></function>{TAGS[1]}",
    "glm45": f"write {TAGS[0]}NAME<arg_key>ONE</arg_key><arg_value>VALUE</arg_value>{TAGS[1]}",
    "lfm2": "write [NAME(ONE=VALUE)]",
    "olmo3": "write NAME(ONE=VALUE), one in a line",
    "gemma4": f"write {GEMMA[0]}call:NAME{{ONE:VALUE}}{GEMMA[1]}",
    "cohere_command3": 'give a list of JSON objects, [{"tool_name": "...", "parameters": {...}}]',
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str  # the text outside of calls
    calls: list[ToolCall]
    error: str = ""  # why a call that was begun could not be read
    reasoning: str = ""  # of models that think in a part of the reply that is marked by special tokens
    text: str = field(default="", compare=False)  # the whole reply without it, calls as written


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a format writes one call: texts around its JSON, and where that has the arguments."""

    begin: str = ""
    end: str = ""
    arguments: str = "arguments"


ReadCalls = Callable[[str], list[ToolCall]]
Read = Callable[[str], Parsed]
UNREADABLE = "unreadable_call"  # the function that a call which cannot be read calls in the conversation


def as_message(parsed: Parsed, ids: Callable[[], str]) -> Message:
    """Return the assistant's message in OpenAI's form. If a call cannot be read, one call represents all."""
    calls = [ToolCall(UNREADABLE, {})] if parsed.error else parsed.calls
    functions = [{"name": call.name, "arguments": as_json(call.arguments)} for call in calls]
    made = [{"id": ids(), "type": "function", "function": function} for function in functions]
    message: Message = {"role": "assistant", "content": (parsed.text if parsed.error else parsed.content) or None}
    message |= {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
    return message | ({"tool_calls": made} if made else {})


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def quote(text: str) -> str:
    return f"{text!r:.{LONGEST_QUOTE}}"


def find_marked_calls(begin: str, end: str, read: ReadCalls | None = None, remedy: str = REMEDY) -> Read:
    """Return a reader of calls between two marks, any number of them between text."""
    return lambda text: collect_calls(*split_between(text, begin, end), read=read, remedy=remedy)


def mistral(text: str) -> Parsed:
    """`[TOOL_CALLS] [{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for every call."""
    content, *bodies = text.split(TOOL_CALLS)
    return collect_calls(content, bodies, read=decode_named)


def llama(text: str) -> Parsed:
    """`{"name": ..., "parameters": {...}}`, several of them between semicolons, often behind a tag."""
    content, tag, body = text.rpartition(PYTHON_TAG)
    return collect_calls(content, [body]) if tag or is_call(body) else Parsed(text.strip(), [])


def plain_json(text: str) -> Parsed:
    """An object with a name and arguments as the whole reply, or in its only fenced block."""
    fences = list(FENCE.finditer(text))
    body = fences[0][1] if len(fences) == 1 else text
    content = text.replace(fences[0][0], "") if len(fences) == 1 else ""
    return collect_calls(content, [body]) if is_call(body) else Parsed(text.strip(), [])


def is_call(text: str) -> bool:
    """Return whether a text is a call, even one that breaks off, and no other JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return BEGUN.match(text) is not None
    objects = value if isinstance(value, list) and value else [value]
    return all(isinstance(one, dict) and "name" in one and {"arguments", "parameters"} & set(one) for one in objects)


def split_between(text: str, begin: str, end: str) -> tuple[str, list[str], str]:
    """Return the text outside of two markers, the texts between them, and what is wrong where one is not closed."""
    content, *pieces = text.split(begin)
    parts = [piece.partition(end) for piece in pieces]
    unclosed = "" if all(closed for _, closed, _ in parts) else f"a {begin} is not closed by {end}"
    content += "".join(after for _, _, after in parts)
    return content, [body for body, closed, _ in parts if closed], unclosed


def collect_calls(
    content: str, bodies: list[str], error: str = "", *, read: ReadCalls | None = None, remedy: str = REMEDY
) -> Parsed:
    """Return the calls that can be read, and why the last other one cannot."""
    calls: list[ToolCall] = []
    for body in bodies:
        try:
            calls += (read or decode_calls)(body)
        except (ValueError, RecursionError) as fault:
            error = f"the tool call could not be read: {fault}; {remedy}"
    return Parsed(content.strip(), calls, error)


def decode_calls(text: str) -> list[ToolCall]:
    """Return the calls of JSON objects with semicolons or nothing between them, or of a list of objects."""
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest or not calls:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {error.pos} of {quote(rest)}") from None
        calls += [call_of(one) for one in (value if isinstance(value, list) and value else [value])]
        rest = rest[end:].lstrip("; \t\r\n")
    return calls


def decode_named(text: str) -> list[ToolCall]:
    named = NAMED.fullmatch(text.rstrip())
    return decode_calls(f'{{"name": {as_json(named[1])}, "arguments": {named[2]}}}') if named else decode_calls(text)


def call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError(f"it has no name: {as_json(value):.{LONGEST_QUOTE}}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']!r} are no object: {as_json(arguments):.{LONGEST_QUOTE}}")
    as_json([value["name"], arguments]).encode()  # half a character, which JSON can write, is a ValueError here
    return ToolCall(value["name"], arguments)


def read_tagged(body: str) -> list[ToolCall]:
    """Return the call with its values as texts: which of them are numbers is for the tool's schema to say."""
    if (function := FUNCTION.fullmatch(body)) is None:
        raise ValueError(f"it is not between <function=NAME> and </function>: {quote(body)}")
    return [call_with_marks(function[1].strip(), function[2], PARAMETER)]


def call_with_marks(name: str, body: str, marks: tuple[str, str, str]) -> ToolCall:
    """Return a call whose arguments stand between marks, as texts; in one pass, however long and broken they are."""
    begin, middle, end = marks
    arguments: dict[str, str] = {}
    rest = body.strip()
    while rest:
        before, begun, tail = rest.partition(begin)
        key, parted, tail = tail.partition(middle)
        value, closed, after = tail.partition(end)
        if before.strip() or not (begun and parted and closed):
            raise ValueError(f"an argument of {name!r} is not between {begin} and {end}: {quote(rest)}")
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n") if marks is PARAMETER else value
        rest = after.strip()
    return call_of({"name": name, "arguments": arguments})


def read_with_keys(body: str) -> list[ToolCall]:
    name, tag, rest = body.partition("<arg_key>")
    if not re.fullmatch(r"[\w.:-]+", name.strip()):
        raise ValueError(f"it does not begin with the name of a function: {quote(body)}")
    return [call_with_marks(name.strip(), re.sub(r"</arg_key>\s+<arg_value>", ARGUMENT[1], tag + rest), ARGUMENT)]


def deepseek(text: str) -> Parsed:
    """Between fullwidth bars: a kind, a name and fenced JSON; or, in later models, a name and JSON."""
    content, tag, rest = text.partition(CALLS)
    _, bodies, error = split_between(rest, CALL, CALL_END)
    if tag and not bodies:
        error = error or f"no {CALL} follows {CALLS}"
    return collect_calls(content, bodies, error, read=read_deepseek, remedy=f"write NAME{SEPARATOR}ARGUMENTS, as JSON")


def read_deepseek(body: str) -> list[ToolCall]:
    first, _, rest = body.partition(SEPARATOR)
    fenced = FENCED.fullmatch(rest)
    name, arguments = (fenced[1], fenced[2]) if fenced else (first, rest)
    return [call_of({"name": name.strip(), "arguments": read_json(arguments)})]


def pythonic(body: str) -> list[ToolCall]:
    try:
        lines = ast.parse(body.strip()).body
    except SyntaxError as error:
        raise ValueError(f"{error.msg} in {quote(body)}") from None
    except MemoryError:  # as Python calls it
        raise ValueError(f"it is nested too deep: {quote(body)}") from None
    values = [line.value if isinstance(line, ast.Expr) else line for line in lines]
    calls = [call for one in values for call in (one.elts if isinstance(one, ast.List) else [one])]
    if not calls:
        raise ValueError("there is none")
    found = []
    for call in calls:
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError(f"it is no call whose arguments have names: {quote(ast.unparse(call))}")
        arguments = {str(one.arg): ast.literal_eval(WithJsonNames().visit(one.value)) for one in call.keywords}
        found.append(call_of({"name": ast.unparse(call.func), "arguments": arguments}))
    return found


class WithJsonNames(ast.NodeTransformer):
    """Reads true, false and null as JSON does; templates write lists and objects in it."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def read_gemma(body: str) -> list[ToolCall]:
    head, brace, rest = body.strip().partition("{")
    pieces = (brace + rest).split(GEMMA_QUOTE)  # every other one is a text
    written = [json.dumps(piece) if at % 2 else GEMMA_KEY.sub(r'"\1":', piece) for at, piece in enumerate(pieces)]
    return [call_of({"name": head.removeprefix("call:").strip(), "arguments": read_json("".join(written))})]


def read_cohere(body: str) -> list[ToolCall]:
    values = read_json(body)
    listed = values if isinstance(values, list) else [values]
    return [call_of({"name": one.get("tool_name"), **one} if isinstance(one, dict) else one) for one in listed]


def phi4(text: str) -> Parsed:
    """`functools[{...}]`."""
    content, begun, body = text.partition(f"{FUNCTOOLS}[")
    return collect_calls(content, [f"[{body}"] if begun else [])


def harmony(text: str) -> Parsed:
    """Messages in channels: what is thought, said, and, where one has a recipient, called."""
    thought: list[str] = []
    spoken: list[str] = []
    bodies: list[str] = []
    error = ""
    for header, body in messages_of(text):
        recipient = RECIPIENT.search(header)
        if recipient and body is None:
            error = f"a call breaks off before {BODY}"
        elif recipient:
            bodies.append(f'{{"name": {json.dumps(recipient[1])}, "arguments": {body or "{}"}}}')
        else:
            (thought if f"{CHANNEL}analysis" in header else spoken).append(body or "")
    remedy = f"write {BODY} and the arguments, as JSON"
    parsed = collect_calls("\n".join(filter(None, spoken)), bodies, error, remedy=remedy)
    return replace(parsed, reasoning="\n".join(thought))


def messages_of(text: str) -> list[tuple[str, str | None]]:
    """Return header and body of each message; a text without messages is a body, a header that breaks off has None."""
    found: list[tuple[str, str | None]] = []
    for message in text.split(MESSAGE):
        header, begun, body = message.partition(BODY)
        if begun:
            found.append((header, ENDS.split(body)[0].strip()))
        elif CHANNEL in header:
            found.append((header, None))
        elif header.strip():
            found.append(("", header.strip()))
    return found


def muse(text: str) -> Parsed:
    """Messages to oneself, which are thought, to the user, and to tools, with calls in tags."""
    found = [(header, body or "") for header, body in messages_of(text)]
    spoken = ATEM_CALLS.sub("", "".join(body for header, body in found if "to=self" not in header))
    pieces, remedy = split_between(spoken, "<atem:invoke", "</atem:invoke>"), "write one <atem:invoke> for each call"
    parsed = collect_calls(*pieces, read=read_invoked, remedy=remedy)
    return replace(parsed, reasoning="\n".join(body for header, body in found if "to=self" in header))


def read_invoked(body: str) -> list[ToolCall]:
    if (invoked := INVOKED.fullmatch(body)) is None:
        raise ValueError(f"it has no name: {quote(body)}")
    return [call_with_marks(invoked[1], invoked[2], ATEM_PARAMETER)]


def read_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos} of {quote(text)}") from None


FORMATS: dict[str, Read] = {"hermes": find_marked_calls(*TAGS), "mistral": mistral, "llama": llama, "json": plain_json}
SPELLINGS = {
    "hermes": Spelling(f"{TAGS[0]}\n", f"\n{TAGS[1]}"),
    "llama": Spelling(arguments="parameters"),
    "json": Spelling(),
}
