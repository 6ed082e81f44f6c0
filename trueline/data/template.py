"""Chat templates: the form of messages that they expect, what they render, and how replies are read."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

from jinja2 import Template as Program
from jinja2.exceptions import TemplateError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trueline.config.base import ConfigError
from trueline.data.messages import Message, Tool, called_functions, content_of, texts_of

MARK = "trueline"  # text that templates leave unchanged
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the most frequent in templates first
TEMPLATE_ARGUMENTS = "data.chat_template_kwargs"
RESERVED = ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "documents")
REMEDY = "set data.chat_template=FILE to a Jinja file that shows it"
HARMONY_START, HARMONY_MESSAGE, HARMONY_END = "<|start|>assistant", "<|message|>", "<|end|>"
PAIRS = {  # special tokens around reasoning
    "<|channel>thought\n": "<channel|>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
WORD = {"word": {"type": "string", "description": "What to look up."}}
SCHEMA = {"type": "object", "properties": WORD, "required": ["word"]}
LOOK_UP = {"name": "look_up", "description": "Look something up.", "parameters": SCHEMA}
PROBE_TOOL: Tool = {"type": "function", "function": LOOK_UP}
OF_DICTS = frozenset(dir(dict))
OF_LOOPS = {name: attrgetter(name) for name in ("first", "last", "index", "index0", "length", "previtem", "nextitem")}


class CallForm(NamedTuple):
    """How a template expects the calls of a message: arguments as JSON text or not, with content or alone."""

    as_text: bool
    alone: bool


CALL_FORMS = [CallForm(as_text, alone) for as_text in (False, True) for alone in (False, True)]


class Template:
    """A tokenizer's chat template and a run's arguments for it, such as enable_thinking."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self.tokenizer, self.arguments = tokenizer, dict(arguments)
        self.source = str(tokenizer.chat_template)
        for name in arguments:
            key = f"{TEMPLATE_ARGUMENTS}.{name}"
            if name in RESERVED:
                raise ConfigError(f"{key}: every rendering sets it by itself: remove it", key=TEMPLATE_ARGUMENTS)
            if not re.search(rf"(?<![\w.]){re.escape(name)}\b", self.source):
                message = (
                    f"{key}: the chat template of {tokenizer.name_or_path} reads no such name: correct or remove it"
                )
                raise ConfigError(message, key=TEMPLATE_ARGUMENTS)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, open_turn: bool) -> str:
        return self.write(self.shape(messages), tools, open_turn=open_turn)

    def shape(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages from the beginning of a conversation in the form that the template expects."""
        return [self.shape_one(message) for message in self._with_system(messages)]

    def write(self, shaped: list[Message], tools: Sequence[Tool], *, open_turn: bool) -> str:
        """Render messages that have their form."""
        try:
            return self._apply(shaped, tools, open_turn=open_turn)
        except (TemplateError, TypeError) as error:  # a template may add an object to text
            roles = ", ".join(message["role"] for message in shaped) or "no messages"
            raise ConfigError(
                f"the chat template rejects the roles {roles}: {error}; change the row, or set data.chat_template to a "
                "Jinja file or never"
            ) from error

    def lost_parts(self, tools: Sequence[Tool]) -> list[str]:
        """Return what the template drops from a conversation with a call, its result and a second question."""
        first = tools[0] if tools else PROBE_TOOL
        named = str(first.get("function", first)["name"])
        call = {"id": "trueline1", "type": "function", "function": {"name": named, "arguments": {"word": "marked A"}}}
        parts: dict[str, Message] = {
            "the system prompt": {"role": "system", "content": "marked S"},
            "the question": {"role": "user", "content": "marked Q"},
            "a tool call": {"role": "assistant", "content": "", "tool_calls": [call]},
            "the result of a tool": {"role": "tool", "content": "marked R", "tool_call_id": "trueline1", "name": named},
            "an earlier reply": {"role": "assistant", "content": "marked E"},
            "a second question": {"role": "user", "content": "marked N"},
        }
        texts = {name: content_of(message) or "marked A" for name, message in parts.items()}
        kept = {name: message for name, message in parts.items() if tools or "tool" not in name}
        text = self.render(list(kept.values()), tools, open_turn=True)
        return [name for name in kept if texts[name] not in text]

    def with_defaults(self) -> Any:
        """Return the template with the run's arguments as defaults, to be saved with the model."""
        if not self.arguments or not isinstance(self.tokenizer.chat_template, str):
            return self.tokenizer.chat_template
        line = "{{%- set {0} = {0} if {0} is defined else {1} -%}}"
        return "".join(line.format(name, as_jinja(value)) for name, value in self.arguments.items()) + self.source

    def reasoning(self) -> str:
        """Describe what happens to the reasoning of earlier replies; empty if the template knows none."""
        if not self.reasoning_key and END_OF_THOUGHT not in self.source:
            return ""
        thought = {"role": "assistant", "content": f"{THOUGHT}\nmarked T\n{END_OF_THOUGHT}\n\nmarked A"}
        question = {"role": "user", "content": "marked Q"}
        try:
            last = self.render([question, thought], (), open_turn=False)
            past = self.render([question, thought, question], (), open_turn=True)
        except ConfigError:
            return ""
        kept = "kept in earlier turns" if "marked T" in past else "dropped from earlier turns"
        return kept if "marked T" in last else "dropped by the template; replies are learned with theirs"

    def generation_spans(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the spans inside the template's own `{% generation %}` marks."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return "", []
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415  (seconds)

        shaped = self.shape(messages)
        found: Any = render_jinja_template(
            conversations=[shaped],
            tools=list(tools) or None,
            chat_template=self.tokenizer.get_chat_template(None, list(tools) or None),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.arguments},
        )
        return found[0][0], [(start, end) for start, end in found[1][0]]

    @cached_property
    def reasoning_key(self) -> str:
        """The field in which the template reads the reasoning of a reply, or empty text."""
        read = r"""(?:\.|\[['"]|\(['"]){0}\b|['"]{0}['"]\s+in\b"""  # message.KEY, ['KEY'], get('KEY'), 'KEY' in
        return next((key for key in REASONING_KEYS if re.search(read.format(key), self.source)), "")

    @cached_property
    def _splits_content(self) -> bool:
        return END_OF_THOUGHT in self.source or not self.reasoning_key

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content must be a list of parts, as in templates of vision models."""
        question = {"role": "user", "content": MARK}
        return not self._shows([question]) and self._shows([{**question, "content": [{"type": "text", "text": MARK}]}])

    @cached_property
    def folds_system(self) -> bool:
        """Whether system messages move into the first user turn, because the template rejects their role."""
        texts = ({"role": "system", "content": "a"}, {"role": "user", "content": MARK})
        messages = [self._with_parts(one) for one in texts]
        return not self._shows(messages) and self._shows(messages[1:])

    @cached_property
    def shows_calls(self) -> bool:
        return self._call_form is not None

    @cached_property
    def _call_form(self) -> CallForm | None:
        """The first form in which the template shows the calls of a turn; None if it shows none."""
        return next((form for form in CALL_FORMS if self._shows_calls(form)), None)

    @cached_property
    def _calls_with_text(self) -> bool:
        form = self._call_form
        return form is not None and self._shows_calls(CallForm(form.as_text, alone=False), "said before")

    def _shows_calls(self, form: CallForm, content: str = "") -> bool:
        call = {"id": "trueline1", "type": "function", "function": {"name": "look_up", "arguments": {"word": MARK}}}
        turn = apply_call_form({"role": "assistant", "content": content, "tool_calls": [call]}, form)
        question = self._with_parts({"role": "user", "content": "a"})
        try:
            text = self._apply([question, turn], [PROBE_TOOL], open_turn=False)
            other = self._apply([question], [PROBE_TOOL], open_turn=False)
        except (TemplateError, TypeError):
            return False
        written = text[len(other) :] if text.startswith(other) else text
        shown = written.count("look_up") > (0 if written is not text else other.count("look_up"))
        return shown and MARK in written and "{'word'" not in written and '\\"word' not in written

    def _shows(self, messages: list[Message]) -> bool:
        try:
            return MARK in self._apply(messages, (), open_turn=False)
        except (TemplateError, TypeError):
            return False

    def _apply(self, messages: list[Message], tools: Sequence[Tool], *, open_turn: bool) -> str:
        given = list(tools) or None
        program = compile_template(self.tokenizer.get_chat_template(None, given))
        named = {**self.tokenizer.special_tokens_map, **self.arguments}
        return program.render(messages=messages, tools=given, documents=None, add_generation_prompt=open_turn, **named)

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages unchanged, or with the system message moved into the first question."""
        if len(messages) < 2 or messages[0]["role"] != "system" or not self.folds_system:
            return messages
        first, second, *others = messages
        system, asked = f"{content_of(first)}\n\n", second.get("content")
        joined = [{"type": "text", "text": system}, *asked] if isinstance(asked, list) else f"{system}{asked or ''}"
        return [{**second, "content": joined}, *others]

    def shape_one(self, message: Message) -> Message:
        """Return a message in the form that the template expects."""
        if message["role"] == "assistant":
            message = self._with_reasoning(message)
            if message.get("tool_calls"):
                alone = bool(content_of(message)) and self.shows_calls and not self._calls_with_text
                message = apply_call_form({**message, "content": None} if alone else message, self._call_form)
        return self._with_parts(message)

    def _with_parts(self, message: Message) -> Message:
        if not self._takes_parts or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _with_reasoning(self, message: Message) -> Message:
        """Put a reply's reasoning where the template reads it: a field, or thinking tags in the content."""
        found = next((key for key in REASONING_KEYS if message.get(key)), "")
        if found == self.reasoning_key and (found or self._splits_content):
            return message
        content, thought = content_of(message), str(message.get(found) or "")
        others = {key: value for key, value in message.items() if key != found}
        if found and not self.reasoning_key:
            return {**others, "content": f"{THOUGHT}\n{thought}\n{END_OF_THOUGHT}\n\n{content}"}
        if not found and END_OF_THOUGHT in content and not self._splits_content:
            thought, content = split_thought(content)
        elif not found:
            return message
        if self.reasoning_key == "thinking" and message.get("tool_calls"):  # gpt-oss takes either, not both
            thought, content = f"{thought}\n{content}".strip(), ""
        return {**others, "content": content, self.reasoning_key: thought}


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a short way to what templates read most: keys of messages, and the place in a loop."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if (obj.__class__ is dict or obj.__class__ is Written) and attribute not in OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if obj.__class__ is LoopContext and attribute in OF_LOOPS:
            return OF_LOOPS[attribute](obj)
        return super().getattr(obj, attribute)


@cache
def compile_template(source: str) -> Program:
    """Compile a template as Transformers does, for a faster sandbox."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415  (seconds)

    theirs = _compile_jinja_template("").environment  # the same for all templates
    extensions = [type(one) for one in theirs.extensions.values()]
    sandbox = Sandbox(trim_blocks=theirs.trim_blocks, lstrip_blocks=theirs.lstrip_blocks, extensions=extensions)
    sandbox.filters = theirs.filters | {"tojson": partial(write_json, theirs.filters["tojson"])}
    program = sandbox.from_string(source)
    program.globals = dict(theirs.globals)  # one that is fast to copy
    return program


class Written(dict[str, Any]):
    """A dict that renderings write as JSON again and again: it keeps what they have written."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self.kept_json: dict[str, str] = {}  # by the options of `tojson`


def write_json(write: Callable[..., str], value: Any, *given: Any, **named: Any) -> str:
    if value.__class__ is not Written:
        return write(value, *given, **named)
    options = repr((given, named)) if given or named else ""
    if options not in value.kept_json:
        value.kept_json[options] = write(value, *given, **named)
    return str(value.kept_json[options])


def apply_call_form(message: Message, form: CallForm | None) -> Message:
    """Return a message with its calls in this form; None: in its text, for a template that shows no calls."""
    as_text = form is not None and form.as_text
    calls = [with_arguments(call, as_text=as_text) for call in message["tool_calls"]]
    if form is not None:
        return {**message, "content": message.get("content") or (None if form.alone else ""), "tool_calls": calls}
    objects = [{key: call.get("function", call)[key] for key in ("name", "arguments")} for call in calls]
    texts = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in objects]
    content = "\n".join([content_of(message), *texts]).strip()
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def with_arguments(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a call with its arguments as JSON text or as an object."""
    if "function" in call:
        return {**call, "function": with_arguments(call["function"], as_text=as_text)}
    arguments = call.get("arguments", {})
    if as_text != isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
    return {**call, "arguments": Written(arguments) if arguments.__class__ is dict else arguments}


def split_thought(text: str) -> tuple[str, str]:
    """Split a reply into its reasoning and the rest."""
    thought, _, said = text.rpartition(END_OF_THOUGHT)
    return thought.removeprefix(THOUGHT).strip(), said.lstrip()


def add_reasoning(completion: str, message: Message, prompt: str) -> str:
    """Add a message's reasoning to its completion if the template drops it: the policy would write it."""
    thought, said = split_thought(content_of(message))
    thought = next((str(message[key]).strip() for key in REASONING_KEYS if message.get(key)), thought)
    if not thought or thought in completion or not said or said not in completion:
        return completion
    begin = "" if prompt.rstrip().endswith(THOUGHT) else f"{THOUGHT}\n"
    return f"{begin}{thought}\n{END_OF_THOUGHT}\n\n{completion[completion.index(said) :]}"


def as_jinja(value: Any) -> str:
    """Return a value as a Jinja expression: JSON, except for null."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {as_jinja(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_jinja, value)) + "]"
    return "none" if value is None else json.dumps(value)


def unseen_fields(message: Message, text: str) -> set[str]:
    """Return the fields of a message that a rendering does not show; calls are found by their names."""
    others = {name: [str(value).strip()] for name, value in message.items() if name not in ("role", "content")}
    others |= {"tool_calls": called_functions(message)}
    role, missing = message["role"], [said for one in texts_of(message) if (said := one.strip()) not in text]
    if role != "assistant" and any(json.dumps(said, ensure_ascii=False)[1:-1] not in text for said in missing):
        others[f"the text of role {role}"] = missing
    return {name for name, values in others.items() if any(value not in text for value in values)}


def tag_thought(thought: str, said: str) -> str:
    return f"{THOUGHT}\n{thought.strip()}\n{END_OF_THOUGHT}\n\n{said}" if thought.strip() else said


def read_harmony(raw: str) -> str:
    """Read the channels of gpt-oss: analysis is reasoning, calls stay unchanged, the rest is content."""
    thoughts: list[str] = []
    said: list[str] = []
    for piece in raw.split(HARMONY_START):
        header, marked, body = piece.partition(HARMONY_MESSAGE)
        body = body.removesuffix(HARMONY_END)
        if not marked or "to=" in header:
            said.append(piece)
        else:
            (thoughts if "analysis" in header else said).append(body)
    return tag_thought("\n".join(thoughts), "".join(said))


def read_pairs(raw: str) -> str:
    for begin, end in PAIRS.items():
        before, begun, rest = raw.partition(begin)
        if begun:
            thought, _, said = rest.partition(end)
            return tag_thought(thought, before + said)
    return raw


def reader_of(template: str) -> Callable[[str], str] | None:
    """Return the function that reads a model's replies, or None if they contain no reasoning tokens."""
    if "<|channel|>" in template and HARMONY_MESSAGE in template:
        return read_harmony
    return read_pairs if any(begin.strip() in template for begin in PAIRS) else None


def learned_text(prompt: str, full: str, other: Callable[[], str], said: str = "") -> str:
    """Return what `full` adds to `prompt`; `other` renders another completion, `said` is the message before."""
    shared = shared_length(prompt, full)
    if not prompt[shared:].strip():
        return full[shared:]
    start = shared_length(other(), full)  # of the turn's own text
    if said and said in full[shared:start]:  # the template rewrites what came before: do not learn that
        opened, header = (text.rpartition(said)[2] for text in (prompt, full[:start]))
        return (header.removeprefix(opened) if header.startswith(opened) else "") + full[start:]
    return full[min(shared, start) :]  # the opened turn may by chance begin like the completion


def shared_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def check_completion(completion: str, message: Message, turn: int, *, shows_calls: bool) -> None:
    if not completion.strip():
        raise ConfigError(f"the chat template drops the text of message {turn + 1}: change the row or the template")
    besides = completion.replace(content_of(message).strip(), "", 1)  # the text may mention the function as well
    if missing := [name for name in called_functions(message) if name not in besides or not shows_calls]:
        raise ConfigError(
            f"the chat template drops the call of {', '.join(missing)} in message {turn + 1}: set "
            "data.chat_template=FILE to one that shows tool calls"
        )
