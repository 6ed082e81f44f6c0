import copy
from itertools import groupby

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import RESULT, TOOL_TALK, TOOL_TEMPLATE, TOOLS, calling
from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat, Encoded, Learn
from trueline.data.messages import Message
from trueline.data.template import learned_text

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETS_REASONING = (
    "{% for message in messages %}<s>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
OPENS_REASONING = CHATML.replace("<s>assistant\n{% endif %}", "<s>assistant\n<think>\n{% endif %}")
WITHOUT_END = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM_IN_THE_LAST_QUESTION = (  # as Mistral's: nowhere else, and not once the answer is there
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}<s>"
    "{% for message in (messages[1:] if system else messages) %}{% if message.role == 'user' %}[INST] "
    "{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ message.content }}[/INST]"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
REFUSES_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    + CHATML
)

TALK = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and one more?"},
    {"role": "assistant", "content": "größer: 3"},
]
MESSAGES = TALK[:2]
THOUGHTS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "<think>easy</think>2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "<think>harder</think>4"},
]


def chat_with(tokenizer: PreTrainedTokenizerFast, template: str | None) -> ChatFormat:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return ChatFormat(own, use_template=True)


def learnt_stretches(chat: ChatFormat, encoded: Encoded) -> list[str]:
    stretches = [
        list(group) for _, group in groupby(zip(encoded.mask, encoded.tokens, strict=True), lambda one: one[0])
    ]
    return [chat.tokenizer.decode([token for _, token in stretch]) for stretch in stretches if stretch[0][0]]


def whole_text(chat: ChatFormat, encoded: Encoded) -> str:
    return str(chat.tokenizer.decode(encoded.tokens))


@pytest.fixture
def templated(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return chat_with(tokenizer, TEMPLATE).tokenizer


def byte_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The demo's tokenizer has one token per byte; for ASCII that is one per character."""
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


def test_without_a_template_contents_are_joined_by_lines(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=True)
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    expected = [*byte_tokens(tokenizer, "brief"), newline, *byte_tokens(tokenizer, "1+1=")]
    assert chat.prompt_tokens(MESSAGES) == expected


def test_a_template_is_applied_with_the_turn_of_the_model_opened(templated: PreTrainedTokenizerFast) -> None:
    parts = [byte_tokens(templated, text) for text in ("system:brief", "user:1+1=assistant:")]
    expected = [token for part in parts for token in (templated.bos_token_id, *part)]
    assert ChatFormat(templated, use_template=True).prompt_tokens(MESSAGES) == expected


def test_a_template_can_be_turned_off(templated: PreTrainedTokenizerFast) -> None:
    plain = ChatFormat(templated, use_template=False)
    assert not plain.templated
    assert plain.prompt_tokens(MESSAGES[1:]) == byte_tokens(templated, "1+1=")


def test_a_completion_carries_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=True)
    assert chat.completion_tokens("12") == [*byte_tokens(tokenizer, "12"), tokenizer.eos_token_id]


def test_a_reply_is_the_text_without_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=True)
    assert chat.reply_text(chat.completion_tokens("zwölf ✓")) == "zwölf ✓"


# Conversations to learn


def test_turns_share_a_sequence_where_the_template_only_appends(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, CHATML)
    (encoded,) = chat.encode(TALK, "all")
    assert whole_text(chat, encoded) == (
        "<s>system\nbrief</s>\n<s>user\n1+1=</s>\n<s>assistant\n2</s>\n"
        "<s>user\nand one more?</s>\n<s>assistant\ngrößer: 3</s>"
    )
    assert learnt_stretches(chat, encoded) == ["2</s>", "größer: 3</s>"]


def test_only_the_last_turn_is_learnt_on_request(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, CHATML)
    (every,), (last,) = chat.encode(TALK, "all"), chat.encode(TALK, "last")
    assert last.tokens == every.tokens
    assert learnt_stretches(chat, last) == ["größer: 3</s>"]


def test_turns_before_the_start_are_context(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, CHATML)
    assert chat.encode(TALK, "all", start=3) == chat.encode(TALK, "last")
    assert chat.encode(TALK, "all", start=2) == chat.encode(TALK, "all")
    assert chat.encode(TALK, "all", start=5) == []


def test_a_template_that_rewrites_earlier_turns_gives_one_sequence_for_each(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, FORGETS_REASONING)
    first, second = chat.encode(THOUGHTS, "all")
    assert whole_text(chat, first) == "<s>user\n1+1=</s>\n<s>assistant\n<think>easy</think>2</s>"
    assert whole_text(chat, second) == (
        "<s>user\n1+1=</s>\n<s>assistant\n2</s>\n<s>user\n2+2=</s>\n<s>assistant\n<think>harder</think>4</s>"
    )
    assert learnt_stretches(chat, first) == ["<think>easy</think>2</s>"]
    assert learnt_stretches(chat, second) == ["<think>harder</think>4</s>"]


def test_such_a_template_joins_turns_that_it_left_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, FORGETS_REASONING)
    talk = [*TALK, {"role": "user", "content": "so?"}, {"role": "assistant", "content": "<think>hm</think>3"}]
    (joined,) = chat.encode(talk, "all")
    assert learnt_stretches(chat, joined) == ["2</s>", "größer: 3</s>", "<think>hm</think>3</s>"]


def test_an_opened_turn_with_text_of_its_own_is_what_the_model_sees(tokenizer: PreTrainedTokenizerFast) -> None:
    """The next turn's prompt has no `<think>` before the earlier answer, so the two cannot share a sequence."""
    chat = chat_with(tokenizer, OPENS_REASONING)
    first, second = chat.encode(TALK[1:], "all")
    assert whole_text(chat, first) == "<s>user\n1+1=</s>\n<s>assistant\n<think>\n2</s>"
    assert learnt_stretches(chat, first) == ["2</s>"]
    assert "assistant\n2</s>" in whole_text(chat, second)
    assert learnt_stretches(chat, second) == ["größer: 3</s>"]


def test_an_answer_that_begins_like_the_opened_turn_stays_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, OPENS_REASONING)
    asked = {"role": "user", "content": "q"}
    (likeness,) = chat.encode([asked, {"role": "assistant", "content": "<thing>"}], "all")
    assert learnt_stretches(chat, likeness) == ["<thing></s>"]
    (reasoning,) = chat.encode([asked, {"role": "assistant", "content": "<think>\nyes</think>a"}], "all")
    assert whole_text(chat, reasoning) == "<s>user\nq</s>\n<s>assistant\n<think>\nyes</think>a</s>"
    assert learnt_stretches(chat, reasoning) == ["yes</think>a</s>"]


def test_a_question_that_is_written_in_another_way_once_it_is_answered_is_not_learnt(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = chat_with(tokenizer, SYSTEM_IN_THE_LAST_QUESTION)
    first, second = chat.encode(TALK, "all")
    assert whole_text(chat, first) == "<s>[INST] brief\n\n1+1=[/INST] 2</s>"
    assert learnt_stretches(chat, first) == [" 2</s>"]
    assert whole_text(chat, second) == ("<s>[INST] 1+1=[/INST] 2</s>[INST] brief\n\nand one more?[/INST] größer: 3</s>")
    assert learnt_stretches(chat, second) == [" größer: 3</s>"]
    (without,) = chat.encode(TALK[1:], "all")
    assert learnt_stretches(chat, without) == [" 2</s>", " größer: 3</s>"]


def test_without_an_end_in_the_template_the_last_answer_gets_one(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, WITHOUT_END)
    (encoded,) = chat.encode(TALK, "all")
    assert whole_text(chat, encoded) == (
        "[system]brief[user]1+1=[assistant]2[user]and one more?[assistant]größer: 3</s>"
    )
    assert learnt_stretches(chat, encoded) == ["2", "größer: 3</s>"]


def test_other_stop_tokens_end_an_answer_too(tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHATML.replace("</s>", "<pad>")
    without, given = ChatFormat(own, True), ChatFormat(own, True, stop_ids=[own.pad_token_id])
    assert learnt_stretches(without, without.encode(TALK, "all")[0]) == ["2<pad>\n", "größer: 3<pad>\n</s>"]
    assert learnt_stretches(given, given.encode(TALK, "all")[0]) == ["2<pad>", "größer: 3<pad>"]


@pytest.mark.parametrize("template", [CHATML, FORGETS_REASONING, OPENS_REASONING, WITHOUT_END, None])
@pytest.mark.parametrize("messages", [TALK, THOUGHTS, TALK[1:3]])
@pytest.mark.parametrize("learn", ["all", "last"])
def test_every_answer_stands_after_its_prompt_and_is_learnt_whole(
    tokenizer: PreTrainedTokenizerFast, template: str | None, messages: list[Message], learn: Learn
) -> None:
    chat = chat_with(tokenizer, template)
    sequences = chat.encode(messages, learn)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    turns = turns if learn == "all" else turns[-1:]
    answers = [text for encoded in sequences for text in learnt_stretches(chat, encoded)]
    opened = "<think>" if template == OPENS_REASONING else ""
    contents = [messages[turn]["content"].removeprefix(opened) for turn in turns]
    assert [answer.removesuffix("</s>") for answer in answers] == contents
    prompts = []
    for encoded in sequences:
        assert encoded.tokens[-1] == chat.tokenizer.eos_token_id
        assert encoded.mask[-1] and not encoded.mask[0]
        starts = [at for at, learnt in enumerate(encoded.mask) if learnt and not encoded.mask[at - 1]]
        prompts += [encoded.tokens[:start] for start in starts]
    assert prompts == [chat.prompt_tokens(messages[:turn]) for turn in turns]


def test_without_a_template_every_turn_is_a_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=False)
    first, second = chat.encode(TALK, "all")
    assert first.tokens == [*chat.prompt_tokens(TALK[:2]), *chat.completion_tokens("2")]
    assert whole_text(chat, second) == "brief\n1+1=\n2\nand one more?größer: 3</s>"
    assert learnt_stretches(chat, second) == ["größer: 3</s>"]


def test_a_turn_that_nothing_precedes_is_context_only(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, CHATML)
    greeting = {"role": "assistant", "content": "hello"}
    (encoded,) = chat.encode([greeting, *TALK[1:3]], "all")
    assert learnt_stretches(chat, encoded) == ["2</s>"]
    assert chat.encode([greeting], "all") == []


def test_the_first_token_is_never_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    document = ChatFormat(tokenizer, use_template=True).encode_document("abc")
    assert document.tokens == [*byte_tokens(tokenizer, "abc"), tokenizer.eos_token_id]
    assert document.mask == [False, True, True, True]


def test_what_a_template_refuses_is_said(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, REFUSES_SYSTEM)
    assert chat.encode(TALK[1:], "all")
    with pytest.raises(ConfigError, match=r"rejects the roles user, system: no; .*data\.chat_template"):
        chat.encode([TALK[1], TALK[0], TALK[2]], "all")


def test_a_system_prompt_goes_into_the_first_question_where_there_is_no_such_role(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = chat_with(tokenizer, REFUSES_SYSTEM)
    (encoded,) = chat.encode(TALK, "all")
    assert learnt_stretches(chat, encoded) == ["2</s>", "größer: 3</s>"]
    assert chat.prompt_text(TALK[:2]) == chat.prompt_text([{"role": "user", "content": "brief\n\n1+1="}])
    assert [one.code for one in chat.findings()] == ["template_without_system_role"]
    assert chat_with(tokenizer, REFUSES_SYSTEM).findings() == []


def test_a_template_that_leaves_out_answers_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, "{% for message in messages %}{% if message.role == 'user' %}u{% endif %}{% endfor %}")
    with pytest.raises(ConfigError, match="drops the text of message 3"):
        chat.encode(TALK, "all")


def test_a_tokenizer_without_an_end_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, None)
    chat.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        chat.encode(TALK, "all")


@pytest.mark.parametrize(
    ("prompt", "full", "other", "learnt"),
    [
        ("s q]", "q] a.", "q] _.", " a."),
        ("s q]", "q: a.", "q: _.", "a."),
        ("u:", "u:a.", "u:_.", "a."),
        ("u:<t>", "u:a.", "u:_.", "a."),
        ("u:<t>", "u:<b.", "u:_.", "<b."),
        ("u:<t>\n", "u:<t>a.", "u:_.", "a."),
        ("u:<t>", "u:<changed>.", "u:_.", "<changed>."),
        ("u:<t>a", "u:<t>b.", "u:<t>_.", "b."),
    ],
)
def test_what_is_learnt_of_a_rendering(prompt: str, full: str, other: str, learnt: str) -> None:
    assert learned_text(prompt, full, lambda: other, "q") == learnt


# Tools

CALLED = '<call>add{"a": 1, "b": 1}</s>'


def test_calls_are_learnt_and_tools_are_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, TOOL_TEMPLATE)
    (encoded,) = chat.encode(TOOL_TALK, "all", tools=TOOLS)
    assert whole_text(chat, encoded) == (
        f"<tools>add;</s>\n<user>1+1=</s>\n<assistant>{CALLED}\n<tool>2</s>\n<assistant>two</s>"
    )
    assert learnt_stretches(chat, encoded) == [CALLED, "two</s>"]
    prompt = chat.tokenizer.decode(chat.prompt_tokens(TOOL_TALK[:3], TOOLS))
    assert whole_text(chat, encoded).startswith(prompt) and prompt.endswith("<tool>2</s>\n<assistant>")
    assert chat.findings() == []


def test_a_call_that_begins_like_the_opened_turn_stays_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    opened = TOOL_TEMPLATE.replace("<assistant>{% endif %}", "<assistant><calm>{% endif %}")
    chat = chat_with(tokenizer, opened)
    (encoded,) = chat.encode(TOOL_TALK[:2], "all")
    assert whole_text(chat, encoded) == f"<user>1+1=</s>\n<assistant><calm>{CALLED}"
    assert learnt_stretches(chat, encoded) == [CALLED]


@pytest.mark.parametrize("content", ["", "I call add."])
def test_a_template_that_leaves_out_calls_is_refused(tokenizer: PreTrainedTokenizerFast, content: str) -> None:
    chat = chat_with(tokenizer, CHATML)
    with pytest.raises(ConfigError, match=r"drops the call of add in message 2: .*data\.chat_template=FILE"):
        chat.encode([TOOL_TALK[0], {**calling(), "content": content}], "all")


def test_without_a_template_calls_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, None)
    for encode in (lambda: chat.prompt_tokens(TOOL_TALK[:3]), lambda: chat.encode(TOOL_TALK[:2], "all")):
        with pytest.raises(ConfigError, match=r"calls add, which only a chat template can show: .*chat_template=FILE"):
            encode()


@pytest.mark.parametrize("template", [CHATML, None])
def test_what_is_not_shown_is_told(tokenizer: PreTrainedTokenizerFast, template: str | None) -> None:
    chat = chat_with(tokenizer, template)
    chat.encode([{**TALK[1], "name": "Ann"}, TALK[2]], "all")
    assert any(one.what.endswith(": name") and one.key == "data.chat_template" for one in chat.findings())
    if template:
        chat.prompt_tokens([*TOOL_TALK[:2], RESULT | {"tool_call_id": "7"}])
        found = {one.code: one.what for one in chat.findings()}
        assert found["template_drops_fields"].endswith(": name, tool_call_id")
        assert "shows no tool calls: they become text" in found["template_without_tool_calls"]


@pytest.mark.parametrize("template", [CHATML, None])
def test_tools_that_are_never_shown_are_refused(tokenizer: PreTrainedTokenizerFast, template: str | None) -> None:
    """By a template that leaves them out, or without one; a prompt that happens to hold a name shows no tool."""
    chat, asked = chat_with(tokenizer, template), [{"role": "user", "content": "add 1 and 1"}]
    chat.tokenizer.name_or_path = "some/model"
    why = "the chat template of some/model drops them" if template else "some/model has no chat template"
    for check in (lambda: chat.check_tools(asked, TOOLS), lambda: chat.encode([*asked, TALK[2]], "all", tools=TOOLS)):
        with pytest.raises(
            ConfigError, match=rf"would not see the tools add, because {why}: .*=FILE .*data.system_prompt"
        ):
            check()
    with pytest.raises(ConfigError, match="tools add"):
        chat.check_tools([{"role": "system", "content": "Give an address."}, *asked], TOOLS)
    described = [{"role": "system", "content": "Call add(a, b) for sums."}, *asked]
    chat.check_tools(described, TOOLS)
    assert len(chat.encode([*described, TALK[2]], "all", tools=TOOLS)) == 1


def test_a_template_that_shows_some_tools_is_refused_for_the_others(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, "{{ tools[0].function.name if tools }}" + CHATML)
    others = [{"type": "function", "function": {"name": name}} for name in ("draw", "shuffle")]
    chat.check_tools(TOOL_TALK[:1], TOOLS)
    with pytest.raises(ConfigError, match="would not see the tools draw, shuffle, because"):
        chat.check_tools(TOOL_TALK[:1], [*TOOLS, *others])


def test_what_is_shown_is_not_told(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, CHATML.replace("message.role", "message.role + ' ' + (message.name or '')"))
    chat.prompt_tokens([{**TALK[1], "name": "Ann"}])
    assert chat.findings() == []


def test_messages_that_are_joined_are_told(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_with(tokenizer, None)
    chat.encode_document("plain text has no messages")
    assert chat.findings() == []
    chat.prompt_tokens(MESSAGES)
    (found,) = chat.findings()
    assert found.code == "no_chat_template" and "joined by line breaks" in found.what and "FILE" in found.why


def test_arguments_of_calls_have_the_form_that_a_template_takes(tokenizer: PreTrainedTokenizerFast) -> None:
    as_text = chat_with(tokenizer, TOOL_TEMPLATE.replace("arguments | tojson", "arguments + ''"))
    as_object = chat_with(tokenizer, TOOL_TEMPLATE)
    assert as_text.encode(TOOL_TALK[:2], "all") == as_object.encode(TOOL_TALK[:2], "all")


@pytest.mark.parametrize("template", [None, CHATML])
def test_prompts_counted_together_have_the_lengths_of_each(
    tokenizer: PreTrainedTokenizerFast, template: str | None
) -> None:
    chat = chat_with(tokenizer, template)
    first = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    chat.tokenizer.backend_tokenizer.post_processor = first  # which a template's text must not get once more
    prompts = [MESSAGES, TALK[:2], [{"role": "user", "content": "größer" * 30}], [{"role": "user", "content": ""}]]
    counted = chat.prompt_lengths([chat.prompt_text(prompt) for prompt in prompts])
    assert counted == [len(chat.prompt_tokens(prompt)) for prompt in prompts]
