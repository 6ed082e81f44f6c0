import copy

import pytest
from transformers import PreTrainedTokenizerFast

from trueline.data.chat import ChatFormat

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "system", "content": "brief"}, {"role": "user", "content": "1+1="}]


@pytest.fixture
def templated(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return own


def byte_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The demo's tokenizer has one token per byte; for ASCII that is one per character."""
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


def test_without_a_template_contents_are_joined_by_lines(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=True)
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    expected = [*byte_tokens(tokenizer, "brief"), newline, *byte_tokens(tokenizer, "1+1=")]
    assert chat.prompt_tokens(MESSAGES) == expected


def test_a_template_is_applied_with_the_turn_of_the_model_opened(templated: PreTrainedTokenizerFast) -> None:
    start = [templated.bos_token_id]
    expected = [
        *start,
        *byte_tokens(templated, "system:brief"),
        *start,
        *byte_tokens(templated, "user:1+1=assistant:"),
    ]
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
