"""Readers of tool calls in tags, in Python, or between special tokens."""

import ast
import json
import re
from dataclasses import replace

from trueline.environments.tools.calls import (
    CLOSE,
    LONGEST_QUOTE,
    OPEN,
    Parsed,
    ToolCall,
    call_of,
    collect_calls,
    decode_calls,
    find_marked_calls,
    split_between,
)

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = ("<parameter=", ">", "</parameter>")
ARGUMENT = ("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
CALLS, CALL, CALL_END, SEPARATOR = (
    f"<\uff5ctool▁{part}\uff5c>" for part in ("calls▁begin", "call▁begin", "call▁end", "sep")
)
FENCED = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)
LFM_CALLS, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_CALLS, OLMO_END = "<function_calls>", "</function_calls>"
GEMMA_CALL, GEMMA_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_KEY = re.compile(r"(?<=[{,])\s*([^\s:,{}\[\]\"]+)\s*:")
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
FUNCTOOLS = "functools"
CHANNEL, BODY = "<|channel|>", "<|message|>"
MESSAGE = "<|start|>assistant"
ENDS = re.compile(r"<\|(?:end|call|return|eom|eot)\|>")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:-]+)")
INVOKED = re.compile(r'\s*name="([^"\n]+)">(.*)', re.DOTALL)
ATEM_PARAMETER = ('<atem:parameter name="', '">', "</atem:parameter>")
ATEM_CALLS = re.compile(r"</?atem:function_calls>")
JSON_NAMES = {"true": True, "false": False, "null": None}


def read_tagged(body: str) -> list[ToolCall]:
    """Return the call with its values as texts: which of them are numbers is for the tool's schema to say."""
    function = FUNCTION.fullmatch(body)
    if function is None:
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
    found = [line.value if isinstance(line, ast.Expr) else line for line in lines]
    calls = [call for one in found for call in (one.elts if isinstance(one, ast.List) else [one])]
    if not calls:
        raise ValueError("there is none")
    return [python_call(call) for call in calls]


def python_call(node: ast.AST) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError(f"it is no call whose arguments have names: {quote(ast.unparse(node))}")
    arguments = {str(keyword.arg): ast.literal_eval(WithJsonNames().visit(keyword.value)) for keyword in node.keywords}
    return call_of({"name": ast.unparse(node.func), "arguments": arguments})


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
    return collect_calls(content, [f"[{body}"] if begun else [], read=decode_calls)


def harmony(text: str) -> Parsed:
    """Messages in channels: what is thought, said, and, where one has a recipient, called."""
    thought: list[str] = []
    said: list[str] = []
    bodies: list[str] = []
    error = ""
    for header, body in messages_of(text):
        recipient = RECIPIENT.search(header)
        if recipient and body is None:
            error = f"a call breaks off before {BODY}"
        elif recipient:
            bodies.append(f'{{"name": {json.dumps(recipient[1])}, "arguments": {body or "{}"}}}')
        else:
            (thought if f"{CHANNEL}analysis" in header else said).append(body or "")
    parsed = collect_calls(
        "\n".join(filter(None, said)), bodies, error, remedy=f"write {BODY} and the arguments, as JSON"
    )
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
    thought = [body for header, body in found if "to=self" in header]
    said = "".join(body for header, body in found if "to=self" not in header)
    content, bodies, error = split_between(ATEM_CALLS.sub("", said), "<atem:invoke", "</atem:invoke>")
    parsed = collect_calls(content, bodies, error, read=read_invoked, remedy="write one <atem:invoke> for each call")
    return replace(parsed, reasoning="\n".join(thought))


def read_invoked(body: str) -> list[ToolCall]:
    invoked = INVOKED.fullmatch(body)
    if invoked is None:
        raise ValueError(f"it has no name: {quote(body)}")
    return [call_with_marks(invoked[1], invoked[2], ATEM_PARAMETER)]


def read_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos} of {quote(text)}") from None


def quote(text: str) -> str:
    return f"{text!r:.{LONGEST_QUOTE}}"


# <tool_call><function=name><parameter=one>value</parameter></function></tool_call>
qwen3_coder = find_marked_calls(
    OPEN, CLOSE, read_tagged, f"write {OPEN}<function=NAME><parameter=ONE>VALUE</parameter></function>{CLOSE}"
)
# <tool_call>name<arg_key>one</arg_key><arg_value>value</arg_value></tool_call>
glm45 = find_marked_calls(
    OPEN, CLOSE, read_with_keys, f"write {OPEN}NAME<arg_key>ONE</arg_key><arg_value>VALUE</arg_value>{CLOSE}"
)
lfm2 = find_marked_calls(LFM_CALLS, LFM_END, pythonic, "write [NAME(ONE=VALUE)]")
olmo3 = find_marked_calls(OLMO_CALLS, OLMO_END, pythonic, "write NAME(ONE=VALUE), one in a line")
gemma4 = find_marked_calls(GEMMA_CALL, GEMMA_END, read_gemma, f"write {GEMMA_CALL}call:NAME{{ONE:VALUE}}{GEMMA_END}")
cohere = find_marked_calls(
    ACTION, ACTION_END, read_cohere, 'give a list of JSON objects, [{"tool_name": "...", "parameters": {...}}]'
)
