"""vLLM's parsers of tool calls, against what the chat template of each family writes."""

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.written_calls import CALLS, FORMAT_OF, HAS_VLLM, LOOK, calls_of, chosen_of, written
from trueline.config.base import ConfigError
from trueline.environments.tools.calls import Parsed, ToolCall
from trueline.environments.tools.formats import FORMATS, CallFormat, Parser, check_format, choose_format, open_parser

pytest.importorskip("vllm")

from trueline.environments.tools.vllm_calls import parsers, read_calls, vllm_parser

LOST = 50  # characters: of the second call, where there are two


@pytest.mark.parametrize("family", HAS_VLLM)
def test_what_a_template_writes_is_read_back(family: str) -> None:
    chosen, tokenizer = chosen_of(family, vllm=True)
    assert chosen.words() == f"{FORMAT_OF[family]} (vLLM's parser), by the chat template"
    parser = open_parser(chosen, tokenizer)
    assert parser.find is not None
    parsed = parser(written(family), LOOK)
    assert (parsed.calls, parsed.error) == (calls_of(family), "")
    assert parsed.content.replace("<think>", "").replace("</think>", "").strip() == ""


@pytest.mark.parametrize("family", HAS_VLLM)
def test_a_call_that_breaks_off_is_an_error_and_other_text_is_none(family: str) -> None:
    chosen, tokenizer = chosen_of(family, vllm=True)
    parser = open_parser(chosen, tokenizer)
    assert parser(written(family)[:-LOST], LOOK).error
    assert parser("All is well.", LOOK) == Parsed("All is well.", [])


def test_vllm_knows_the_parsers_of_the_table() -> None:
    assert {form.vllm for form in FORMATS if form.vllm} <= set(parsers())


def test_parsers_by_name(tokenizer: PreTrainedTokenizerFast) -> None:
    pythonic = choose_format("pythonic", "", vllm=False)
    assert pythonic.by_vllm
    parsed = open_parser(pythonic, tokenizer)('[look_up(count="3", digits="3")]', LOOK)
    assert parsed == Parsed("", [ToolCall("look_up", {"count": 3, "digits": "3"})])
    with pytest.raises(ConfigError, match=r"tool_format=none is not known: give one of auto, .* vLLM's: .*pythonic"):
        check_format("none")
    with pytest.raises(ConfigError, match=r"no parser 'none' of tool calls: it has .*hermes.*; or give one of auto, "):
        open_parser(choose_format("none", "", vllm=True), tokenizer)


def test_a_tokenizer_without_the_markers_is_read_by_our_reader(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="vLLM's parser 'deepseek_v3' of tool calls refuses the model's tokenizer: "):
        vllm_parser("deepseek_v3", tokenizer)
    parser = open_parser(choose_format("deepseek_v3", "", vllm=True), tokenizer)
    assert parser.find is None
    assert parser.remark.startswith(
        "tool calls deepseek_v3 (our reader): vLLM's parser 'deepseek_v3' of tool calls ref"
    )
    assert parser(written("deepseekv3"), LOOK).calls == CALLS


def test_a_format_that_only_vllm_reads_says_what_is_begun_and_not_read() -> None:
    def blind(text: str, tools: object) -> Parsed:
        return Parsed(text, [])

    parsed = Parser(CallFormat("other", begin="<call>", vllm="other"), blind)("So: <call>add(1", [])
    assert (parsed.calls, parsed.text) == ([], "So: <call>add(1")
    assert "<call> begins none that is closed" in parsed.error


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_that_vllm_hands_on_unread(arguments: str) -> None:
    parsed = read_calls([SimpleNamespace(name="add", arguments=arguments)], "so")
    assert (parsed.content, parsed.calls) == ("so", [])
    assert parsed.error


def test_the_vocabulary_is_not_read_for_each_reply() -> None:
    """It takes a quarter of a second to read one of 150,000 tokens, and a step has thousands of replies."""
    times_read = 0

    class Counting(PreTrainedTokenizerFast):
        def get_vocab(self) -> dict[str, int]:
            nonlocal times_read
            times_read += 1
            return super().get_vocab()

    chosen, tokenizer = chosen_of("qwen3_6", vllm=True)
    tokenizer.__class__ = Counting
    parser, text = open_parser(chosen, tokenizer), written("qwen3_6")
    before = times_read
    assert all(parser(text, LOOK).calls == CALLS for _ in range(3))
    assert before > 0 and times_read == before
