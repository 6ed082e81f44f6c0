"""The chat template: what of a conversation is learned, and what a prompt is made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from jinja2 import TemplateError

from trueline.data.chat import ChatFormat, Encoded
from trueline.data.messages import Message, Tool
from trueline.verify.comparison import Comparison, Result, compare
from trueline.verify.divisions import guard
from trueline.verify.subject import Subject

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "Return the height of the tide.",
        "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
    },
}
CALL = {"type": "function", "id": "call00001", "function": {"name": "get_tide", "arguments": {"harbour": "Oban"}}}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWERED: Message = {"role": "tool", "name": "get_tide", "tool_call_id": "call00001", "content": "fourteen feet"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True, slots=True)
class Exchange:
    messages: list[Message]
    learned: list[str]  # a part of each reply, in order
    unlearned: list[str]  # parts of all other messages
    tools: Sequence[Tool] = field(default=())


FIRST, SECOND = "Where is the ferry?", "And the night train?"
HERE, LATE = "It has left the harbour.", "It comes at eleven."
EXCHANGES = {
    "one turn": Exchange([user(FIRST), assistant(HERE)], [HERE], [FIRST]),
    "several turns": Exchange(
        [user(FIRST), assistant(HERE), user(SECOND), assistant(LATE)], [HERE, LATE], [FIRST, SECOND]
    ),
    "system prompt": Exchange(
        [{"role": "system", "content": "Be brief and kind."}, user(FIRST), assistant(HERE)],
        [HERE],
        ["Be brief and kind.", FIRST],
    ),
    "tools": Exchange(
        [user("How high is the water?"), CALLED, ANSWERED, assistant("It is high now.")],
        ["Oban", "It is high now."],
        ["How high is the water?", "fourteen feet"],
        (TOOL,),
    ),
}


def compare_masks(subject: Subject) -> Iterator[Comparison]:
    if not subject.chat.templated:
        yield Comparison("template", "learned tokens", Result.LEFT_OUT, remark="the model has no chat template")
        return
    for name, talk in EXCHANGES.items():
        yield from guard(f"template, {name}", partial(check_exchange, subject.chat, f"template, {name}", talk))


def check_exchange(chat: ChatFormat, check: str, talk: Exchange) -> list[Comparison]:
    encoded = chat.encode(talk.messages, "all", tools=talk.tools)
    problems = [*wrong_turns(chat, talk, encoded)]
    found = [compare(check, "learned tokens", len(problems), 0, "; ".join(problems[:2]))]
    plain = plain_prompt(chat, talk)
    if plain is None:
        return [*found, Comparison(check, "prompt", Result.LEFT_OUT, remark="Transformers cannot render it as it is")]
    tokens, ours = encoded[0].tokens, chat.prompt_tokens(talk.messages[: first_reply(talk)], talk.tools)
    differs = not plain == ours == tokens[: encoded[0].mask.index(True)]
    return [*found, compare(check, "prompt", int(differs), 0, "" if differs else "as Transformers renders it")]


def wrong_turns(chat: ChatFormat, talk: Exchange, encoded: list[Encoded]) -> Iterator[str]:
    """Say what is wrong with the learned parts: each is one reply, ends with a stop token, and has nothing else."""
    runs = [run for one in encoded for run in learned_runs(one)]
    if len(runs) != len(talk.learned):
        yield f"{len(runs)} learned parts of {len(talk.learned)} replies"
        return
    for number, (run, reply) in enumerate(zip(runs, talk.learned, strict=True), 1):
        text = str(chat.tokenizer.decode(run, skip_special_tokens=False))
        others = [part for part in (*talk.unlearned, *talk.learned) if part != reply]
        if reply not in text:
            yield f"reply {number} is not learned whole: {text!r:.60}"
        if strange := [part for part in others if part in text]:
            yield f"{strange[0]!r} is learned with reply {number}"
        if run[-1] not in chat.stop_ids:
            yield f"reply {number} is learned without its end: {text!r:.60}"
        if any(token in chat.stop_ids for token in run[:-1]):
            yield f"what follows the end of reply {number} is learned: {text!r:.60}"
    text = "".join(str(chat.tokenizer.decode(one.tokens)) for one in encoded)
    for part in talk.unlearned:
        if part not in text:
            yield f"{part!r} is missing"


def learned_runs(encoded: Encoded) -> Iterator[list[int]]:
    """Yield the learned tokens that follow each other without a gap."""
    run: list[int] = []
    for token, learned in zip([*encoded.tokens, -1], [*encoded.mask, False], strict=True):
        if learned:
            run.append(token)
        elif run:
            yield run
            run = []


def first_reply(talk: Exchange) -> int:
    return next(at for at, message in enumerate(talk.messages) if message["role"] == "assistant")


def plain_prompt(chat: ChatFormat, talk: Exchange) -> list[int] | None:
    """Return the first prompt as Transformers alone renders it, or None where it cannot without our help."""
    messages = talk.messages[: first_reply(talk)]
    in_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    given = {"tools": [*talk.tools] or None, "add_generation_prompt": True, "tokenize": False}
    for form in (messages, in_parts):  # templates of models that read pictures take the second
        try:
            text = chat.tokenizer.apply_chat_template(form, **given, **chat.template.arguments)
        except TemplateError:
            return None
        if all(one["content"] in text for one in messages):
            return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
    return None
