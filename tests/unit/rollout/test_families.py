"""Episodes with tools under the real templates of many families: what the policy calls, hears and is trained on."""

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.support.model_table import FAMILIES, check_cell
from tests.support.templates import families
from tests.unit.data.test_templates import SYSTEM, TALK, chat_of, has_tools, learnt
from tests.unit.rollout.test_session import Play, Playing, Scripted, check_recorded
from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message, Tool
from trueline.data.template import PROBE_TOOL
from trueline.data.types import Prompt, Trajectory
from trueline.environments.base import EpisodeResult, Policy
from trueline.environments.multi_turn import number_names
from trueline.environments.tools.calls import Parsed, as_message
from trueline.environments.tools.formats import choose_format, open_parser
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.session import EpisodeLimits

WEATHER: Tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of some days.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "Which town."},
                "days": {"type": "integer", "description": "How many days."},
            },
            "required": ["town", "days"],
        },
    },
}
TOOLS = [WEATHER, PROBE_TOOL]
ASKED: list[Message] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How is it in Zürich?"}]
MADE: list[dict[str, Any]] = [{"town": 'Zürich "See"', "days": 2}, {"town": "12", "days": 12}]
UNSPELLED = {  # calls as models of these families write them, which their templates do not show
    "lfm2": '<|tool_call_start|>[weather(town="{town}", days={days})]<|tool_call_end|>',
    "smollm3": '<tool_call>\n{{"name": "weather", "arguments": {{"town": "{town}", "days": {days}}}}}\n</tool_call>',
}


class Kitchen:
    """A family's template, an engine that says what it is told, and the parser that a run would choose."""

    def __init__(self, family: str) -> None:
        self.chat: ChatFormat = chat_of(family)
        self.engine = Scripted(self.chat.tokenizer, [])
        engine: Any = self.engine
        self.episodes = Episodes(EnginePool([engine]), self.chat, EpisodeLimits(context=9000, turns=6))
        chosen = choose_format("auto", self.chat.tokenizer.chat_template, vllm=False)
        self.parse = open_parser(chosen, self.chat.tokenizer)
        self.parsed: list[Parsed] = []

    def run(self, play: Play) -> Trajectory:
        params = SamplingParams(1.0, 2000, tuple(self.chat.stop_ids))
        prompt = Prompt(0, ASKED, tools=TOOLS)
        return asyncio.run(self.episodes.run(Playing(play), prompt, RolloutKey(5, 1, 3), params))

    def spelled(self, family: str, arguments: dict[str, Any]) -> str:
        """Return a call as the policy of this family samples it."""
        if family in UNSPELLED:
            return UNSPELLED[family].format(town=arguments["town"].replace('"', '\\"'), days=arguments["days"])
        call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        (sequence,) = self.chat.encode([*ASKED, turn], "last", tools=TOOLS)
        return str(
            self.chat.raw_text([token for token, known in zip(sequence.tokens, sequence.mask, strict=True) if known])
        )

    def worded(self, raw: str, ids: Any) -> Message:
        self.parsed.append(self.parse(raw, TOOLS))
        return as_message(self.parsed[-1], ids)


async def with_tools(kitchen: Kitchen, policy: Policy, prompt: Prompt) -> EpisodeResult:
    messages, ids = prompt.messages, number_names("call")
    for number in range(len(MADE) + 1):
        reply = await policy.reply(messages, prompt.tools, partial(kitchen.worded, ids=ids))
        calls = reply.message.get("tool_calls", [])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": f"sunny {number}"}
            for call in calls
        ]
        messages = [*messages, reply.message, *results]
    return EpisodeResult(1.0)


@pytest.mark.parametrize("family", [name for name in families() if has_tools(name)])
def test_two_rounds_of_tools(family: str) -> None:
    """The calls are those that were made, and each next prompt holds all results so far."""
    kitchen = Kitchen(family)
    kitchen.engine.texts = [*(kitchen.spelled(family, made) for made in MADE), "It is sunny."]
    trajectory = kitchen.run(partial(with_tools, kitchen))
    assert [[(call.name, call.arguments) for call in one.calls] for one in kitchen.parsed] == [
        *([("weather", made)] for made in MADE),
        [],
    ]
    asked = [kitchen.chat.tokenizer.decode(tokens) for tokens, _, _ in kitchen.engine.asked]
    for number, text in enumerate(asked):
        assert "Be kind." in text and "How is it in" in text
        for before in range(number):
            assert f"sunny {before}" in text
    table: Any = kitchen
    check_recorded(table, trajectory)
    assert trajectory.reply.endswith("It is sunny.")


@pytest.mark.parametrize("family", [name for name in families() if has_tools(name)])
def test_an_unreadable_call_is_answered_in_every_family(family: str) -> None:
    kitchen = Kitchen(family)
    whole = kitchen.spelled(family, MADE[0])
    broken = whole[: whole.index("town") + len("to")]
    kitchen.engine.texts = [broken, kitchen.spelled(family, MADE[1]), "It is sunny."]
    kitchen.run(partial(with_tools, kitchen))
    assert kitchen.parsed[0].error and not kitchen.parsed[0].calls
    asked = [kitchen.chat.tokenizer.decode(tokens) for tokens, _, _ in kitchen.engine.asked]
    assert "sunny 0" in asked[1] and "sunny 1" in asked[2]
    assert kitchen.parsed[1].calls


def test_other_arguments_of_the_template_begin_another_sequence() -> None:
    kitchen = Kitchen("qwen3_instruct_2507")
    template = "{{ greeting if greeting is defined else '' }}" + str(kitchen.chat.tokenizer.chat_template)
    kitchen.chat.tokenizer.chat_template = template
    kitchen.engine.texts = ["one", "two", "three"]

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        first = await policy.reply(prompt.messages)
        messages = [*prompt.messages, first.message, {"role": "user", "content": "More?"}]
        (second,) = await policy.replies(1, messages, template_arguments={"greeting": "hi"})
        further = [*messages, second.message, {"role": "user", "content": "And more?"}]
        await policy.replies(1, further, template_arguments={"greeting": "hi"})
        return EpisodeResult(1.0)

    kitchen.chat = ChatFormat(kitchen.chat.tokenizer, use_template=True)
    kitchen.episodes.chat = kitchen.chat
    trajectory = kitchen.run(play)
    asked = [kitchen.chat.tokenizer.decode(tokens) for tokens, _, _ in kitchen.engine.asked]
    assert [text.startswith("hi") for text in asked] == [False, True, True]
    assert len(trajectory.sequences()) == 2 and asked[2].startswith(asked[1])


# The table of docs/models.md

TEMPLATE_OF = {
    "Llama 3.1": "llama3_1",
    "Llama 3.2": "llama3_2",
    "Qwen2.5": "qwen2_5",
    "Qwen3": "qwen3",
    "Qwen3-Instruct-2507": "qwen3_instruct_2507",
    "Qwen3.5": "qwen3_5_think",
    "Qwen3.6": "qwen3_6",
    "Qwen3-Coder": "qwen3_coder",
    "Mistral v0.3": "mistral_v0_3",
    "Mistral Small": "mistral_small",
    "Gemma 2": "gemma",
    "Gemma 3": "gemma3",
    "Gemma 4": "gemma4_v5",
    "Phi-3": "phi3",
    "Phi-3.5": "phi3_5",
    "DeepSeek-R1 distill": "deepseek_r1_distill",
    "DeepSeek-V3": "deepseekv3",
    "GLM-4.5": "glm4moe",
    "gpt-oss": "gptoss",
    "SmolLM2": "smollm2",
    "SmolLM3": "smollm3",
    "OLMo 2": "olmo2",
    "LFM2": "lfm2_v2",
    "Mixtral": "mixtral",
    "Qwen3-MoE": "qwen3",
}


def mask_cell(chat: ChatFormat, talk: list[Message]) -> str:
    """Say whether exactly the assistant's turns are learnt, each behind all that was said before."""
    sequences = chat.encode(talk, "all")
    stretches = [stretch for sequence in sequences for stretch in learnt(chat, sequence)]
    answers = [str(message["content"]) for message in talk if message["role"] == "assistant"]
    others = [str(message["content"]) for message in talk if message["role"] != "assistant"]
    right = len(stretches) == len(answers) and all(
        answer in stretch and not any(other in stretch for other in others)
        for stretch, answer in zip(stretches, answers, strict=True)
    )
    whole = chat.tokenizer.decode(sequences[-1].tokens)
    if not right or any(other not in whole for other in others):
        return f"wrong: {stretches}"
    return "exact" if len(sequences) == 1 else "exact, a sequence for each turn"


def tools_cell(family: str, chat: ChatFormat) -> str:
    """Run an episode of two rounds, where the template shows tools."""
    try:
        chat.check_tools(TALK[:1], [PROBE_TOOL])
    except ConfigError:
        return "refused: its template shows no tools"
    test_two_rounds_of_tools(family)
    return f"exact, read as {choose_format('auto', chat.tokenizer.chat_template, vllm=False).form.name}"


def thinking_cell(chat: ChatFormat) -> str:
    """Say what becomes of reasoning, once it is seen to be learnt with its reply."""
    reply = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nAnswer 0 is here."}
    (encoded,) = chat.encode([TALK[0], reply], "all")
    (stretch,) = learnt(chat, encoded)
    if stretch.count("Let me see.") != 1 or stretch.count("Answer 0 is here.") != 1 or "Question" in stretch:
        return f"wrong: {stretch}"
    return f"exact, {chat.template.reasoning() or 'part of the text'}"


@pytest.mark.models
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_models_says_what_templates_do(family: str) -> None:
    chat = chat_of(TEMPLATE_OF[family])
    check_cell(family, "mask, one turn", mask_cell(chat, TALK[:2]))
    check_cell(family, "mask, several turns", mask_cell(chat, TALK))
    folded = ", in the first question" * chat.template.folds_system
    check_cell(family, "system prompt", mask_cell(chat, [SYSTEM, *TALK[:2]]) + folded)
    check_cell(family, "two rounds of tools", tools_cell(TEMPLATE_OF[family], chat))
    check_cell(family, "thinking", thinking_cell(chat))
