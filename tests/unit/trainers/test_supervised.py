import pytest
from transformers import PreTrainedTokenizerFast

from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat
from trueline.data.readers import Example
from trueline.trainers.supervised import to_sample


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(tokenizer, use_template=True)


def example(prompt: str, completion: str) -> Example:
    return Example([{"role": "user", "content": prompt}], completion, "file.jsonl, line 7")


def test_the_completion_and_its_end_are_learnt(chat: ChatFormat) -> None:
    sample = to_sample(example("1+1=", "2"), chat, max_tokens=6)
    assert sample.tokens.tolist() == [
        *chat.prompt_tokens([{"role": "user", "content": "1+1="}]),
        *chat.completion_tokens("2"),
    ]
    assert sample.mask.tolist() == [False] * 4 + [True, True]


def test_a_row_that_is_too_long_is_named(chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"file\.jsonl, line 7: 6 tokens are more than max_tokens=5"):
        to_sample(example("1+1=", "2"), chat, max_tokens=5)
