"""Read dataset rows as training records, in the usual formats."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from trueline.config.base import ConfigError
from trueline.config.data import DataConfig
from trueline.data.messages import Message, Tool, content_of
from trueline.data.pictures import Picture, image_parts, refuse_pictures, take_pictures
from trueline.data.readers import (
    choose_column,
    messages_or_text,
    parse_messages,
    read_messages,
    read_tools,
    read_turns,
    renamed_roles,
    text_of,
    value_of,
    with_system,
)
from trueline.data.rows import Located


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[Message]
    place: str
    tools: list[Tool] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()  # in the order of the messages' image parts


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text for continued pre-training."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float
    place: str
    tools: list[Tool] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()  # of the prompt


@dataclass(frozen=True, slots=True)
class Rated:
    prompt: list[Message]
    completion: list[Message]
    desirable: bool
    place: str
    tools: list[Tool] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()  # of the prompt


@dataclass(frozen=True, slots=True)
class StepRated:
    """A completion in steps, each with its label from 0 to 1."""

    prompt: list[Message]
    steps: list[str]
    labels: list[float]
    place: str
    tools: list[Tool] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()  # of the prompt


class Role(NamedTuple):
    """What a column contains in a format; `data.<name>_column` names the column."""

    name: str
    usual: tuple[str, ...]
    required: bool = True


Columns = dict[str, str]  # role -> column; empty if the data has none
Record = TypeVar("Record")
RowReader = Callable[[Located, Columns, DataConfig], list[Record]]

PROMPT = Role("prompt", ("prompt", "question", "messages"))
COMPLETION = Role("completion", ("completion", "answer", "response"))
FORMATS = {
    "messages": (Role("messages", ("messages",)),),
    "conversations": (Role("messages", ("conversations", "conversation")),),
    "alpaca": (Role("prompt", ("instruction",)), Role("input", ("input",), False), Role("completion", ("output",))),
    "completion": (PROMPT, COMPLETION),
    "text": (Role("text", ("text",)),),
    "preference": (
        Role("prompt", ("prompt", "question"), False),
        Role("chosen", ("chosen",)),
        Role("rejected", ("rejected",)),
    ),
    "rated": (PROMPT, COMPLETION, Role("rating", ("label",))),
    "steps": (PROMPT, Role("completion", ("completions",)), Role("rating", ("labels",))),
}
TRUTH = {"true": True, "false": False, "1": True, "0": False}
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"\n\n(Human|Assistant):")


def read_pairs(rows: list[Located], config: DataConfig, margin_column: str | None = None) -> tuple[list[Pair], str]:
    """Read pairs; `margin_column` is by how much the chosen completion is better, 0 without it."""
    if margin_column is not None:
        choose_column(rows[0], margin_column, (), "reward_model.margin_column")

    def read(located: Located, columns: Columns, config: DataConfig) -> list[Pair]:
        prompt, chosen, rejected = completions_of(located, columns, config)
        margin = number_of(located, margin_column) if margin_column is not None else 0.0
        return [Pair(prompt, chosen, rejected, margin, located.place, read_tools(located))]

    return read_rows(rows, config, {"preference": read})


def check_ratings(records: list[Rated]) -> None:
    """Refuse a dataset whose completions are all desirable or all undesirable."""
    if len({record.desirable for record in records}) == 1:
        kind, missing = ("true", "false") if records[0].desirable else ("false", "true")
        raise ConfigError(
            f"{records[0].place} to {records[-1].place}: all {len(records)} labels are {kind}, but both kinds are "
            f"needed: add rows with the label {missing}"
        )


def read_rows(
    rows: list[Located], config: DataConfig, readers: dict[str, RowReader[Record]]
) -> tuple[list[Record], str]:
    """Return the records of all rows, and a description of their format; `readers` are the formats of the task."""
    name, columns = find_format(rows[0], config, list(readers))
    found = [column for column in columns.values() if column]
    records = [
        with_pictures(record, located, config) for located in rows for record in readers[name](located, columns, config)
    ]
    renamed = renamed_roles({column: located.row.get(column) for column in found} for located in rows)
    roles = f"; roles: {renamed}" if renamed else ""
    return records, f"{name} (column{'s' if len(found) > 1 else ''} {', '.join(found)}){roles}"


def with_pictures(record: Any, located: Located, config: DataConfig) -> Any:
    """Return a record with the pictures of its row, or unchanged if it has none."""
    match record:
        case Conversation(messages=messages):
            messages, pictures = take_pictures(located, messages, config.max_pixels)
            return replace(record, messages=messages, pictures=pictures) if pictures else record
        case Pair(chosen=chosen, rejected=rejected):
            completions = [*chosen, *rejected]
        case Rated(completion=completion):
            completions = completion
        case StepRated():
            completions = []
        case _:  # plain text
            refuse_pictures(located, [])
            return record
    if any(True for _ in image_parts(completions)):
        raise ConfigError(f"{located.place}: a completion has a picture: move it into the prompt, or delete the row")
    prompt, pictures = take_pictures(located, record.prompt, config.max_pixels)
    return replace(record, prompt=prompt, pictures=pictures) if pictures else record


def find_format(first: Located, config: DataConfig, allowed: list[str]) -> tuple[str, Columns]:
    """Return the configured format, or the first one whose columns the first row has, and the columns."""
    if config.format not in ("auto", *allowed):
        raise ConfigError(f"data.format={config.format} does not suit this task: set auto or {', '.join(allowed)}")
    keys = config.model_dump()
    columns = {role.name: keys.get(f"{role.name}_column") for name in allowed for role in FORMATS[name]}
    named = {name for name, column in columns.items() if column is not None}

    def fits(name: str) -> bool:
        required = [role for role in FORMATS[name] if role.required and role.name not in named]
        known = named <= {role.name for role in FORMATS[name]}
        return known and all(any(column in first.row for column in role.usual) for role in required)

    name = next(filter(fits, allowed), "") if config.format == "auto" else config.format
    if name:
        return name, {
            role.name: choose_column(first, columns[role.name], role.usual, f"data.{role.name}_column", role.required)
            for role in FORMATS[name]
        }
    required = {name: ["/".join(role.usual) for role in FORMATS[name] if role.required] for name in allowed}
    shapes = "; ".join(f"{name}: {' + '.join(parts)}" for name, parts in required.items())
    given = f" with data.{', data.'.join(f'{name}_column' for name in sorted(named))}" if named else ""
    raise ConfigError(
        f"{first.place} has the columns {', '.join(first.row)}, which{given} match no known format ({shapes}): "
        "name the columns with data.<part>_column=... or set data.format"
    )


def prompt_and_completion(
    located: Located, columns: Columns, config: DataConfig
) -> tuple[list[Message], list[Message]]:
    prompt = read_messages(located, columns["prompt"], config.system_prompt)
    completion = read_turns(located, columns["completion"], "assistant")
    check_completion(completion, located, columns["completion"])
    return prompt, completion


def check_completion(completion: list[Message], located: Located, column: str) -> None:
    if not completion or completion[0]["role"] != "assistant" or completion[-1]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in completion) or "nothing"
        raise ConfigError(
            f"{located.place}: column {column!r}: a completion must begin and end with an assistant message, found "
            f"{roles} after the prompt"
        )


def read_chat(located: Located, columns: Columns, config: DataConfig) -> list[Conversation | Document]:
    column = columns["messages"]
    messages = parse_messages(messages_or_text(located, column), located, column)
    if all(message["role"] != "assistant" for message in messages[1:]):
        raise ConfigError(
            f"{located.place}: column {column!r} has no assistant message after another one, so there is nothing to "
            "learn: add it, or set data.completion_column to the column with the completion"
        )
    return [Conversation(with_system(messages, config.system_prompt), located.place, read_tools(located))]


def read_alpaca(located: Located, columns: Columns, config: DataConfig) -> list[Conversation | Document]:
    """Read an Alpaca row; its input, if any, follows the instruction."""
    request = text_of(located, columns["prompt"])
    added = located.row.get(columns["input"]) or ""
    if not isinstance(added, str):
        raise ConfigError(f"{located.place}: column {columns['input']!r} must be text, found {added!r:.80}")
    content = f"{request}\n\n{added}" if added.strip() else request
    completion = {"role": "assistant", "content": text_of(located, columns["completion"])}
    messages = with_system([{"role": "user", "content": content}, completion], config.system_prompt)
    return [Conversation(messages, located.place, read_tools(located))]


def read_completion(located: Located, columns: Columns, config: DataConfig) -> list[Conversation | Document]:
    prompt, completion = prompt_and_completion(located, columns, config)
    return [Conversation(prompt + completion, located.place, read_tools(located))]


def read_text(located: Located, columns: Columns, config: DataConfig) -> list[Conversation | Document]:
    if config.system_prompt is not None:
        raise ConfigError(f"data.system_prompt={config.system_prompt!r:.80}: plain text has no messages; remove it")
    return [Document(text_of(located, columns["text"]), located.place)]


def completions_of(
    located: Located, columns: Columns, config: DataConfig
) -> tuple[list[Message], list[Message], list[Message]]:
    """Return prompt, chosen and rejected; whole conversations are split where they differ."""
    prompt = read_messages(located, columns["prompt"], None) if columns["prompt"] else []
    read = partial(read_turns, role="assistant") if prompt else whole_conversation
    chosen, rejected = read(located, columns["chosen"]), read(located, columns["rejected"])
    if chosen == rejected:
        raise ConfigError(
            f"{located.place}: chosen and rejected are the same, {content_of(chosen[-1])!r:.80}: fix or delete it"
        )
    if {chosen[0]["role"], rejected[0]["role"]} != {"assistant"}:
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        shared = same.index(False) if False in same else len(same)
        if any(message not in chosen[:shared] for message in prompt):
            raise ConfigError(
                f"{located.place}: chosen and rejected are whole conversations, but the {shared} messages they share "
                f"do not contain the prompt {content_of(prompt[-1])!r:.80}"
            )
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise ConfigError(f"{located.place}: there is no prompt: add a column with it")
    check_completion(chosen, located, columns["chosen"])
    check_completion(rejected, located, columns["rejected"])
    return with_system(prompt, config.system_prompt), chosen, rejected


def whole_conversation(located: Located, column: str) -> list[Message]:
    """Read messages, or text with turns marked as `\\n\\nHuman:` and `\\n\\nAssistant:`."""
    value = messages_or_text(located, column)
    if isinstance(value, list):
        return parse_messages(value, located, column)
    before, *marked = TURN.split(text_of(located, column))
    if before.strip() or not marked:
        raise ConfigError(
            f"{located.place}: column {column!r} is text and there is no prompt: set data.prompt_column, or give whole "
            "conversations as messages"
        )
    speakers, contents = marked[::2], marked[1::2]
    turns = [{"role": SPEAKERS[who], "content": what.strip()} for who, what in zip(speakers, contents, strict=True)]
    return parse_messages(turns, located, column)


def number_of(located: Located, column: str) -> float:
    value = value_of(located, column)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{located.place}: column {column!r} must be a number, found {value!r:.80}")
    return number


def rated_of(located: Located, columns: Columns, config: DataConfig) -> list[Rated]:
    prompt, completion = prompt_and_completion(located, columns, config)
    return [Rated(prompt, completion, truth_of(located, columns["rating"]), located.place, read_tools(located))]


def rated_from_pair(located: Located, columns: Columns, config: DataConfig) -> list[Rated]:
    prompt, chosen, rejected = completions_of(located, columns, config)
    completions, tools = ((chosen, True), (rejected, False)), read_tools(located)
    return [Rated(prompt, completion, desirable, located.place, tools) for completion, desirable in completions]


def truth_of(located: Located, column: str) -> bool:
    value = value_of(located, column)
    if isinstance(value, str) and value.strip().lower() in TRUTH:
        return TRUTH[value.strip().lower()]
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise ConfigError(f"{located.place}: column {column!r} must be true or false (or 1 or 0), found {value!r:.80}")


def steps_of(located: Located, columns: Columns, config: DataConfig) -> list[StepRated]:
    for column in (columns["completion"], columns["rating"]):
        if not isinstance(value := value_of(located, column), list) or not value:
            raise ConfigError(f"{located.place}: column {column!r} must be a non-empty list, found {value!r:.80}")
    steps, labels = located.row[columns["completion"]], located.row[columns["rating"]]
    for number, step in enumerate(steps, 1):
        if not isinstance(step, str) or not step.strip():
            raise ConfigError(f"{located.place}: step {number} must be non-empty text, found {step!r:.80}")
    if len(steps) != len(labels):
        raise ConfigError(f"{located.place}: {len(steps)} steps have {len(labels)} labels: give each step one label")
    for number, label in enumerate(labels, 1):
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise ConfigError(f"{located.place}: label {number} must be true, false or 0 to 1, found {label!r:.80}")
    prompt = read_messages(located, columns["prompt"], config.system_prompt)
    return [StepRated(prompt, steps, [float(label) for label in labels], located.place, read_tools(located))]


CONVERSATION_READERS: dict[str, RowReader[Conversation | Document]] = {
    "messages": read_chat,
    "conversations": read_chat,
    "alpaca": read_alpaca,
    "completion": read_completion,
    "text": read_text,
}
RATED_READERS: dict[str, RowReader[Rated]] = {"rated": rated_of, "preference": rated_from_pair}  # a pair gives two
read_conversations = partial(read_rows, readers=CONVERSATION_READERS)
read_rated = partial(read_rows, readers=RATED_READERS)
read_steps = partial(read_rows, readers={"steps": steps_of})
