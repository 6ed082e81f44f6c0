"""Calls of a tool as the template of each family writes them: what a model of the family would sample."""

import json
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.support.templates import ends_of, tokenizer_of
from trueline.data.messages import Message, Tool
from trueline.environments.tools.calls import ToolCall
from trueline.environments.tools.formats import AUTO, FORMATS, ChosenFormat, choose_format

PLACE = {
    "type": "object",
    "description": "Where.",
    "properties": {
        "city": {"type": "string", "description": "Its name."},
        "at": {"type": "array", "items": {"type": "number"}, "description": "Where it lies."},
    },
}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "description": "A text."},
    "digits": {"type": "string", "description": "A text of digits."},
    "count": {"type": "integer", "description": "A whole number."},
    "share": {"type": "number", "description": "A number."},
    "place": PLACE,
}
LOOK: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)},
        },
    }
]
CALLS = [
    ToolCall(
        "look_up",
        {
            "text": 'Füße, 日本 and "so on"',
            "digits": "007",
            "count": 12,
            "share": 1.5,
            "place": {"city": "Zürich", "at": [47.4, 8]},
        },
    ),
    ToolCall("look_up", {"text": "a b", "digits": "1", "count": -3, "share": 0.25, "place": {"city": "", "at": []}}),
]
FORMAT_OF = {  # a family -> the format that its template is of
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "smollm3"), "hermes"),
    **dict.fromkeys(("qwen3_coder", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), "qwen3_coder"),
    **{f"nemotron_3_{size}": "qwen3_coder" for size in ("nano", "super", "ultra", "5_lightning")},
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama"),
    **dict.fromkeys(("mistral_v0_3", "mistral_small"), "mistral"),
    **dict.fromkeys(("gemma4", *(f"gemma4_v{number}" for number in range(2, 6)), "diffusion_gemma"), "gemma4"),
    **dict.fromkeys(("deepseekv3", "deepseek_r1_distill"), "deepseek_v3"),
    **dict.fromkeys(("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), "lfm2"),
    "glm4moe": "glm45",
    "gptoss": "openai",
    "muse_glimmer": "muse_glimmer",
    "olmo3": "olmo3",
}
WITHOUT = ("cohere", "cohere2", "gemma3", "llama3", "olmo2", "phi3", "phi3_5", "qwen2_5_vl", "smollm2")  # no tools
ONE_CALL = ("gptoss", "llama3_1", "llama3_2")  # whose templates refuse or leave out a second one
WRITTEN_BY = {"lfm2": "lfm2_v2", "smollm3": "qwen2_5"}  # templates that leave out calls -> one that writes them so
HAS_VLLM = [family for family, name in FORMAT_OF.items() if any(form.name == name and form.vllm for form in FORMATS)]


def calls_of(family: str) -> list[ToolCall]:
    return CALLS[:1] if family in ONE_CALL else CALLS


def chosen_of(family: str, *, vllm: bool) -> tuple[ChosenFormat, PreTrainedTokenizerFast]:
    tokenizer = tokenizer_of(family)
    return choose_format(AUTO, tokenizer.chat_template, vllm=vllm), tokenizer


def written(family: str) -> str:
    """Return the assistant's turn up to its stop token, special tokens included, as it is sampled."""
    source = WRITTEN_BY.get(family, family)
    tokenizer, ends = tokenizer_of(source), ends_of(source)
    asked: list[Message] = [{"role": "user", "content": "Look it up."}]
    said = [*asked, message_of(calls_of(family), as_text=source.startswith("deepseek"))]
    opened, full = (
        tokenizer(
            tokenizer.apply_chat_template(
                messages, tools=LOOK, tokenize=False, add_generation_prompt=messages is asked
            ),
            add_special_tokens=False,
        )["input_ids"]
        for messages in (asked, said)
    )
    pairs = enumerate(zip(opened, full, strict=False))
    start = next((at for at, (one, other) in pairs if one != other), min(len(opened), len(full)))
    text = str(tokenizer.decode(full[start:])).removesuffix("\n")
    stop = max((end for end in (ends.eos, *ends.others) if text.endswith(end)), key=len, default="")
    return text.removesuffix(stop)


def message_of(calls: list[ToolCall], *, as_text: bool) -> Message:
    arguments = [json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments for call in calls]
    made = [
        {"id": f"call{at:05d}", "type": "function", "function": {"name": call.name, "arguments": one}}
        for at, (call, one) in enumerate(zip(calls, arguments, strict=True))
    ]
    return {"role": "assistant", "content": None if as_text else "", "tool_calls": made}
