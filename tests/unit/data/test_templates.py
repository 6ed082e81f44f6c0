"""Chat templates of many families: what is learnt of a conversation, and what of it the policy sees.

Marks that others have put around what is to be learnt are the witness. Of them two things are left out here, for no
policy samples them: what the generation prompt holds already, and what stands behind the token at which a reply stops.
"""

import re
from itertools import groupby

import pytest
from jinja2 import Environment

from tests.support.templates import TRAINING, ends_of, families, template_of, tokenizer_of
from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat, Encoded
from trueline.data.messages import Message
from trueline.data.template import PROBE_TOOL, as_jinja

SYSTEM = {"role": "system", "content": "Be brief and kind."}
TALK: list[Message] = [
    message
    for turn in range(3)
    for message in (
        {"role": "user", "content": f"Question {turn} of mine?"},
        {"role": "assistant", "content": f"Answer {turn} is here."},
    )
]
REWRITES = (  # templates that drop or move parts of earlier turns, so that each turn is a sequence
    "deepseek_r1_distill",
    "deepseekv3",
    "gptoss",
    "mistral_v0_3",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
)


def chat_of(family: str, *, marks: bool = True, **arguments: object) -> ChatFormat:
    tokenizer = tokenizer_of(family, marks=marks)
    stops = tokenizer.convert_tokens_to_ids(list(ends_of(family).others))
    return ChatFormat(tokenizer, use_template=True, stop_ids=stops, arguments=arguments)


def learnt(chat: ChatFormat, encoded: Encoded) -> list[str]:
    """Return the stretches of a sequence that are learnt, as text."""
    pairs = groupby(zip(encoded.tokens, encoded.mask, strict=True), key=lambda pair: pair[1])
    return [chat.tokenizer.decode([token for token, _ in group]) for known, group in pairs if known]


def sampled_part(chat: ChatFormat, marked: str, prompt: str) -> str:
    """Return what a policy samples of a marked text: neither what the prompt holds, nor what follows its end."""
    opened = prompt.rpartition("mine?")[2]
    begun = re.compile(r"(<think>)?\s*")  # which the prompt of a model that thinks may hold besides
    sizes = [size for size in range(1, len(marked) + 1) if marked[:size] in opened]
    held = max((size for size in sizes if begun.fullmatch(opened.rpartition(marked[:size])[2])), default=0)
    text = marked[held:]
    ends = [chat.tokenizer.decode([token]) for token in chat.stop_ids]
    places = [text.index(end) + len(end) for end in ends if end in text]
    return text[: min(places)] if places else text


def plain_families() -> list[str]:
    return [name for name in families() if not name.endswith(TRAINING)]


def marked_families() -> list[str]:
    return [name for name in families(training=True) if name.endswith(TRAINING)]


@pytest.mark.parametrize("family", marked_families())
def test_what_is_learnt_is_what_others_have_marked(family: str) -> None:
    talk, bare, witness = [SYSTEM, *TALK], chat_of(family, marks=False), chat_of(family)
    text, spans = witness.template.generation_spans(talk, ())
    sequences = bare.encode(talk, "all")
    prompts = [bare.prompt_text(talk[:turn]) for turn in (2, 4, 6)]
    expected = [
        sampled_part(bare, text[slice(*span)], prompt)
        for span, prompt in zip(merged(spans, text, bare), prompts, strict=True)
    ]
    found = [stretch for sequence in sequences for stretch in learnt(bare, sequence)]
    if family == "gptoss_training":  # a reply that ends a conversation ends as it is sampled, not as history has it
        expected = [one.removesuffix("<|end|>").removesuffix("<|return|>") + "<|return|>" for one in expected]
    assert found == expected
    if len(sequences) == 1:  # token by token
        (only,) = sequences
        offsets = bare.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert only.tokens[: len(only.tokens) - 1] == offsets["input_ids"][: len(only.tokens) - 1]
        marked = [any(start <= at < end for start, end in spans) for at, _ in offsets["offset_mapping"]]
        ours = [*only.mask, *[False] * (len(marked) - len(only.mask))]
        assert all(theirs for theirs, mine in zip(marked, ours, strict=False) if mine)


def test_marks_of_one_text_differ_between_templates() -> None:
    """Show why marks are a witness and no rule: two templates write the same text, and mark it differently."""
    texts, marks = zip(
        *(
            chat_of(name).template.generation_spans([SYSTEM, *TALK], ())
            for name in ("qwen2_5_training", "qwen2_5_vl_training")
        ),
        strict=True,
    )
    assert texts[0] == texts[1]
    assert marks[0] != marks[1]


def merged(spans: list[tuple[int, int]], text: str, chat: ChatFormat) -> list[tuple[int, int]]:
    """Join the marks of one turn, where a template marks its text and its end apart, or bits of white space."""
    turns: list[tuple[int, int]] = []
    for start, end in spans:
        if turns and "Question" not in text[turns[-1][1] : start]:
            turns[-1] = turns[-1][0], end
        else:
            turns.append((start, end))
    return turns


@pytest.mark.parametrize("family", plain_families())
@pytest.mark.parametrize("system", [False, True])
def test_exactly_the_assistants_turns_are_learnt(family: str, system: bool) -> None:
    talk, chat = [SYSTEM] * system + TALK, chat_of(family)
    sequences = chat.encode(talk, "all")
    moved = family == "mistral_v0_3" and not system  # only a system prompt moves
    assert (len(sequences) > 1) == (family in REWRITES and not moved)
    found = [stretch for sequence in sequences for stretch in learnt(chat, sequence)]
    assert len(found) == 3
    for turn, stretch in enumerate(found):
        assert f"Answer {turn} is here." in stretch
        assert "Question" not in stretch and "brief" not in stretch
    for sequence in sequences:
        assert sequence.tokens[-1] in chat.stop_ids and sequence.mask[-1]
        assert "brief and kind" in chat.tokenizer.decode(sequence.tokens) or not system


ROUNDS = 2
CALL_ARGUMENTS = {"word": "Zürich"}


def called(number: int) -> Message:
    function = {"name": "look_up", "arguments": CALL_ARGUMENTS | {"word": f"Zürich {number}"}}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def two_rounds() -> list[Message]:
    """Return a conversation in which the policy calls a tool twice before it answers."""
    rounds = [
        message
        for number in range(ROUNDS)
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [called(number)]},
            {"role": "tool", "content": f"result {number}", "tool_call_id": f"call{number:05d}", "name": "look_up"},
        )
    ]
    return [SYSTEM, {"role": "user", "content": "Which town?"}, *rounds]


def has_tools(family: str) -> bool:
    return bool(re.search(r"\btools\b", template_of(family)))


@pytest.mark.parametrize("family", [name for name in plain_families() if has_tools(name)])
def test_every_part_of_two_rounds_of_tools_is_shown(family: str) -> None:
    chat = chat_of(family)
    text = chat.tokenizer.decode(chat.prompt_tokens(two_rounds(), [PROBE_TOOL]))
    parts = ["brief and kind", "Which town?", "Zürich 0", "result 0", "Zürich 1", "result 1"]
    assert [part for part in parts if part not in text and part.encode("unicode_escape").decode() not in text] == []
    assert text.count("look_up") >= ROUNDS
    assert chat.lost_parts([PROBE_TOOL]) == []


@pytest.mark.parametrize("family", [name for name in plain_families() if has_tools(name)])
def test_what_follows_a_call_is_appended_to_the_tokens_that_were_sampled(family: str) -> None:
    """Where the template only appends: as if it had written all at once. Where it rewrites, a new sequence begins."""
    chat, talk, tools = chat_of(family), two_rounds(), [PROBE_TOOL]
    if chat.template.reasoning() and family != "qwen3_5_nothink":  # whose prompt ends it
        talk[2]["reasoning_content"] = "A town it is."
    asked, replied, whole = talk[:2], talk[:3], talk[:4]
    if chat.continuation(replied, whole[3:], tools) is None:
        assert family in ("deepseek_r1_distill", "deepseekv3")  # which leave out what their prompt begins with
        return
    if not chat.template.shows_calls:
        assert family in ("lfm2", "smollm3")
        return
    (sequence,) = chat.encode(replied, "last", tools=tools)
    prompt = chat.prompt_tokens(asked, tools)
    sampled = sequence.tokens[len(prompt) :]
    if family == "glm4moe":  # which stops at the marker of the result that it waits for
        sampled[-1:] = chat.tokenizer.convert_tokens_to_ids(["<|observation|>"])
    assert sequence.tokens[: len(prompt)] == prompt and sampled[-1] in chat.stop_ids
    following = chat.continuation(replied, whole[3:], tools, last=sampled[-1])
    together = [*prompt, *sampled, *(following or [])]
    expected = chat.prompt_tokens(whole, tools)
    assert chat.tokenizer.decode(together) == chat.tokenizer.decode(expected)
    assert together == expected


def thinking(family: str) -> bool:
    return bool(chat_of(family).template.reasoning())


@pytest.mark.parametrize("family", [name for name in plain_families() if thinking(name)])
def test_reasoning_is_learnt_with_the_reply_that_it_belongs_to(family: str) -> None:
    """However the message has it, and whatever the template leaves of it in earlier turns."""
    chat = chat_of(family)
    asked = TALK[0]
    tagged = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nAnswer 0 is here."}
    adapter_only = {"role": "assistant", "content": "Answer 0 is here.", "reasoning_content": "Let me see."}
    if family == "qwen3_5_nothink":  # whose prompt ends the reasoning before it begins
        pytest.skip("this template asks for no reasoning")
    for reply in (tagged, adapter_only):
        ((stretch,),) = [learnt(chat, one) for one in chat.encode([asked, reply], "all")]
        assert stretch.count("Let me see.") == 1 and stretch.count("Answer 0 is here.") == 1
        assert "Question" not in stretch


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        (
            "gptoss",
            "<|channel|>analysis<|message|>Let me see.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Answer 0 is here.<|return|>",
        ),
        ("gemma4_v5", "<|channel>thought\nLet me see.<channel|>Answer 0 is here.<turn|>"),
        ("qwen3", "<think>\nLet me see.\n</think>\n\nAnswer 0 is here.<|im_end|>"),
    ],
)
def test_reasoning_stands_in_thinking_tags_whatever_tokens_set_it_apart(family: str, raw: str) -> None:
    chat = chat_of(family)
    said = "<think>\nLet me see.\n</think>\n\nAnswer 0 is here."
    tokens = chat.text_tokens(raw)
    assert chat.reply_text(tokens) == said
    assert chat.raw_text(tokens) == chat.tokenizer.decode(tokens[:-1])
    again = chat.prompt_text([TALK[0], {"role": "assistant", "content": said}, TALK[2]])
    assert "Answer 0 is here." in again and "Let me see." not in again  # which these leave out of earlier turns


def test_arguments_reach_the_template_and_its_saved_form() -> None:
    plain, calm = chat_of("qwen3"), chat_of("qwen3", enable_thinking=False)
    assert calm.prompt_text(TALK[:1]) == plain.prompt_text(TALK[:1]) + "<think>\n\n</think>\n\n"
    assert plain.with_arguments({"enable_thinking": False}).prompt_text(TALK[:1]) == calm.prompt_text(TALK[:1])
    assert plain.with_arguments({}) is plain
    saved = tokenizer_of("qwen3")
    saved.chat_template = calm.template.with_defaults()
    again = ChatFormat(saved, use_template=True)
    assert again.prompt_text(TALK[:1]) == calm.prompt_text(TALK[:1])
    assert again.with_arguments({"enable_thinking": True}).prompt_text(TALK[:1]) == plain.prompt_text(TALK[:1])
    assert plain.template.with_defaults() == plain.tokenizer.chat_template


@pytest.mark.parametrize(("name", "reason"), [("enable_thinkin", "reads no such name"), ("tools", "sets it by itself")])
def test_arguments_that_no_template_reads_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.chat_template_kwargs\.{name}: .*{reason}"):
        chat_of("qwen3", **{name: True})


def test_a_value_is_written_as_jinja_reads_it() -> None:
    values = {"a": None, "b": [True, 1.5, "x'\"y"], "c": {"d": False}}
    rendered = Environment().from_string("{{ value == " + as_jinja(values) + " }}").render(value=values)
    assert rendered == "True"


def test_what_a_template_leaves_out_of_several_turns_is_refused() -> None:
    chat_of("qwen2_5").check_rounds([PROBE_TOOL])
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- message.content }}", "", 1)  # of the role tool
    deaf = ChatFormat(tokenizer, use_template=True)
    assert deaf.lost_parts([PROBE_TOOL]) == ["the result of a tool"]
    assert deaf.lost_parts(()) == []
    with pytest.raises(ConfigError, match="leaves out the result of a tool of a conversation with tools: set data"):
        deaf.check_rounds([PROBE_TOOL])


@pytest.mark.parametrize(("family", "shown"), [("deepseek_r1_distill", ()), ("gptoss", ("Let me see.", "I look."))])
def test_a_call_is_shown_where_text_beside_it_is_not(family: str, shown: tuple[str, ...]) -> None:
    """One template leaves out calls beside text; the other takes text or reasoning beside a call, not both."""
    chat = chat_of(family)
    reply = {"role": "assistant", "content": "I look.", "reasoning_content": "Let me see.", "tool_calls": [called(0)]}
    text = chat.prompt_text([TALK[0], reply, two_rounds()[3]], [PROBE_TOOL])
    assert [part for part in ("look_up", "Zürich 0", "result 0", *shown) if part not in text] == []
