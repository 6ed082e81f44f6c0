"""The next prompt of a conversation, made from the one before: token by token what rendering everything anew gives."""

import random
import re
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from tests.support.templates import families
from tests.unit.data.test_templates import SYSTEM, chat_of, has_tools
from trueline.config.base import ConfigError
from trueline.data import chat as chat_module
from trueline.data.chat import ChatFormat, OpenPrompt
from trueline.data.messages import Message, Tool
from trueline.data.template import MARK, PROBE_TOOL, unseen_fields

TEXTS = ("It is sunny.", "user", "a", "größer: 3", "look_up", "  spaced\n\n", '{"word": "x"}', "<tool_call> no")
THOUGHTS = ("", "", "<think>\nLet me see.\n</think>\n\n", "<think>\n\n</think>\n\n")


class Anew:
    """Renders all messages three times a turn, by Transformers and its tokenizer alone."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.left_out: set[str] = set()

    def render(self, messages: list[Message], tools: list[Tool], open_turn: bool) -> str:
        options = {"tools": tools or None, "tokenize": False, "add_generation_prompt": open_turn}
        return str(self.chat.tokenizer.apply_chat_template(self.chat.template.shape(messages), **options))

    def note(self, messages: list[Message], text: str) -> str:
        self.left_out.update(*(unseen_fields(message, text) for message in messages))
        return text

    def tokens(self, text: str) -> list[int]:
        return list(self.chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    def begin(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        return self.tokens(self.note(messages, self.render(messages, tools, True)))

    def follow(self, messages: list[Message], new: list[Message], tools: list[Tool], last: int) -> list[int] | None:
        opened = self.note(messages[:-1], self.render(messages[:-1], tools, True))
        closed = self.render(messages, tools, False)
        whole = self.note([*messages, *new], self.render([*messages, *new], tools, True))
        if not closed.startswith(opened):
            return None
        stop = self.chat._stop_span(closed, len(opened), messages[-1])
        end = len(closed) if stop is None else stop[1]
        if not whole.startswith(closed[:end]):
            return None
        if stop is not None:
            return self.tokens(whole[end if last in self.chat.stop_ids else stop[0] :])
        marked = [*messages[:-1], {"role": "assistant", "content": MARK}]
        _, found, closing = self.render(marked, tools, False).rpartition(MARK)
        tokens = self.tokens(whole[end - len(closing) if found and closed.endswith(closing) else end :])
        return tokens[1:] if tokens[:1] == [last] else tokens


def call_of(number: int, word: str) -> dict[str, Any]:
    function = {
        "name": "look_up",
        "arguments": f'{{"word": "{word} {number}", "texts": [1, {{"kept_json": "größer"}}]}}',
    }
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def round_of(chance: random.Random, number: int, tools: list[Tool]) -> tuple[Message, list[Message]]:
    """Return a reply and what follows it: results of calls, or another question, often with the words of the reply."""
    text, other = chance.choice(TEXTS), chance.choice(TEXTS)
    reply: Message = {"role": "assistant", "content": chance.choice(THOUGHTS) + text}
    if not tools or chance.random() < 0.3:
        return reply, [{"role": "user", "content": chance.choice((text, other))}]
    calls = [call_of(10 * number + place, "Zürich") for place in range(chance.choice((1, 1, 2)))]
    reply |= {"content": chance.choice((None, "", text)), "tool_calls": calls}
    if chance.random() < 0.3:
        reply["reasoning_content"] = "Let me see."
    named = {"role": "tool", "name": "look_up"}
    return reply, [{**named, "tool_call_id": call["id"], "content": chance.choice((text, other))} for call in calls]


@pytest.mark.parametrize("family", families())
def test_the_next_prompt_is_that_of_a_whole_rendering(family: str) -> None:
    """However the template rewrites or refuses turns; also what it leaves out is noted as by a whole rendering."""
    chat = chat_of(family)
    anew = Anew(chat)
    tools = [PROBE_TOOL] if has_tools(family) else []
    followed = 0
    for seed in range(3):
        chance = random.Random(f"{family} {seed}")
        messages: list[Message] = [SYSTEM] * (seed % 2) + [{"role": "user", "content": chance.choice(TEXTS)}]
        prompt = chat.begin(messages, tools)
        assert prompt.tokens == anew.begin(messages, tools)
        for number in range(4):
            reply, new = round_of(chance, number, tools)
            last = chance.choice([*sorted(chat.stop_ids), 40])
            try:
                expected = anew.follow([*messages, reply], new, tools, last)
            except (TemplateError, TypeError) as error:
                with pytest.raises(ConfigError, match=re.escape(str(error))):
                    chat.follow(prompt, reply, new, last)
                break
            found = chat.follow(prompt, reply, new, last)
            assert (None if found is None else found.tokens) == expected
            assert chat.left_out == anew.left_out
            messages = [*messages, reply, *new]
            followed += found is not None
            prompt = found if found is not None else chat.begin(messages, tools)
            assert expected is not None or prompt.tokens == anew.begin(messages, tools)
    assert followed or family.startswith("deepseek")  # which rewrites every turn


def test_a_template_that_writes_the_time_goes_on() -> None:
    """What it wrote before is no longer what it would write now, but nothing of the conversation is rewritten."""
    chat = chat_of("qwen2_5")
    chat.template.arguments["now"] = "Monday"
    chat.tokenizer.chat_template = "{{ now }}" + str(chat.tokenizer.chat_template)
    asked, reply = [{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}
    prompt = chat.begin(asked)
    expected = chat.follow(prompt, reply, asked, None)
    chat.template.arguments["now"] = "Tuesday"
    found = chat.follow(prompt, reply, asked, None)
    assert isinstance(expected, OpenPrompt) and isinstance(found, OpenPrompt)
    assert found.tokens == expected.tokens and found.text.startswith("Tuesday")


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "gptoss", "mistral_v0_3"])
@pytest.mark.parametrize(
    "text", ["It is sunny.", "größer <|im_end|> 3", "<think>\na\n</think>\n\nb", "[TOOL_CALLS] [{}]"]
)
def test_a_reply_without_special_tokens_is_not_decoded_twice(family: str, text: str) -> None:
    """Where its text is known, it is the raw text too if no special token makes a difference."""
    chat = chat_of(family)
    for end in ([], [chat.tokenizer.eos_token_id], [chat.tokenizer.pad_token_id]):
        tokens = [*chat.text_tokens(text), *end]
        assert chat.raw_text(tokens, chat.reply_text(tokens)) == chat.raw_text(tokens)


def test_completions_of_one_prompt_share_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MOST_BEGUN", 2)
    chat = chat_of("qwen2_5")
    asked = [[{"role": "user", "content": text}] for text in "abc"]
    first = chat.begin(asked[0])
    assert chat.begin(list(asked[0])).tokens is first.tokens == chat.prompt_tokens(asked[0])
    for one in asked:
        chat.begin(one)
    assert len(chat.begun) == 2 and chat.begin(asked[0]).tokens is not first.tokens
