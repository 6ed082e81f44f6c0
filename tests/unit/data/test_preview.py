import copy

import torch
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.data.chat import ChatFormat
from trueline.data.encoding import encode_conversations
from trueline.data.formats import Conversation
from trueline.data.preview import render
from trueline.data.types import Sample

MESSAGES = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+1="},
    {"role": "assistant", "content": "3 ✓"},
]


def test_learnt_stretches_are_bracketed(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=False)
    samples = encode_conversations([Conversation(MESSAGES, "")], chat, 64, "all", "error").samples
    assert [render(sample, tokenizer, color=False) for sample in samples] == [
        "6 tokens, 2 learnt\n1+1=⟦2</s>⟧",
        "16 tokens, 6 learnt\n1+1=\n2\n+1=⟦3 ✓</s>⟧",
    ]


def test_learnt_stretches_are_colored(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = torch.tensor(tokenizer("abcd")["input_ids"])
    sample = Sample(tokens, torch.tensor([False, True, False, True]))
    assert render(sample, tokenizer, color=True) == ("4 tokens, 2 learnt\na\x1b[7;32mb\x1b[0mc\x1b[7;32md\x1b[0m")


def test_a_sample_without_anything_learnt_is_plain(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = Sample(torch.tensor(tokenizer("ab")["input_ids"]), torch.tensor([False, False]))
    assert render(sample, tokenizer, color=False) == "2 tokens, 0 learnt\nab"


def test_calls_and_tools_are_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TOOL_TEMPLATE
    talk = Conversation(TOOL_TALK[:2], "", TOOLS)
    (sample,) = encode_conversations([talk], ChatFormat(own, True), 99, "all", "error").samples
    assert '<tools>add;</s>\n<user>1+1=</s>\n<assistant>⟦<call>add{"a": 1, "b": 1}</s>⟧' in render(sample, own, False)
