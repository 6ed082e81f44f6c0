"""Chat templates of many families: those that TRL's wheel holds, some written down here, and tokenizers for them."""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TRAINING = "_training"  # the end of a name: the same template with marks around what is learnt, and some patches
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
SPECIAL = re.compile(  # `<|a|>`, DeepSeek's bars, Gemma's halves, `[A]`, and the rest by name
    r"<\|[\w/]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<\|[\w\"]+>|<[\w\"]+\|>|<\|\"\|>|\[/?[A-Z_]{4,}\]|\[gMASK\]|<sop>|<(?:start|end)_of_\w+>"
)
ADDED = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")  # tokens that decoding keeps

OWN = {
    "mistral_v0_3": """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(turn=0, lead='') %}
{%- if messages[0].role == 'system' %}{% set ns.lead = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% endif %}{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == 'user' %}
{%- set last = m == users[-1] %}
{%- if last and tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (ns.lead if last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant, tool and a first system message') }}{% endif %}
{%- endfor %}""",
    "mistral_small": """{{ bos_token }}{%- if messages[0].role == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- set ns = namespace(turn=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{% set arguments = call.function.arguments %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- arguments if arguments is string else arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant, tool and a first system message') }}{% endif %}
{%- endfor %}""",
    "mixtral": """{%- set ns = namespace(lead='') %}
{%- if messages[0].role == 'system' %}{% set ns.lead = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% endif %}{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ ' [INST] ' + (ns.lead if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}""",
    "qwen3_coder": """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{ '\\n<function>\\n<name>' + tool.function.name + '</name>\\n</function>' }}{% endfor %}
{{- '\\n</tools>\\n\\nTo call one:\\n<tool_call>\\n<function=name>\\n<parameter=one>\\nvalue\\n</parameter>\\n' }}
{{- '</function>\\n</tool_call><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n' if loop.previtem.role != 'tool' else '' }}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "olmo2": """{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}
{{- eos_token if m.role == 'assistant' else '' }}{{ '\\n' if not loop.last or m.role != 'assistant' else '' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    "olmo3": """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou call functions.' }}
{%- if tools %}{{ ' <functions>' + (tools | tojson) + '</functions>' }}{% endif %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\\n' }}
{{- m.content or '' }}
{%- if m.role == 'system' and tools %}{{ ' <functions>' + (tools | tojson) + '</functions>' }}{% endif %}
{%- if m.tool_calls %}{{ '<function_calls>' }}{% for call in m.tool_calls %}{{ call.function.name + '(' }}
{%- for name, value in call.function.arguments | items %}{{ name + '=' + (value | tojson) }}
{{- ', ' if not loop.last else '' }}{% endfor %}{{ ')' + ('\\n' if not loop.last else '') }}{% endfor %}
{{- '</function_calls>' }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "smollm2": """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}
{%- endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # It shows tools and their answers, and of the assistant's messages no more than the content.
    "smollm3": """{%- set thinks = enable_thinking is not defined or enable_thinking %}
{{- '<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: ' + ('/think' if thinks else '/no_think') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% set messages = messages[1:] %}{% endif %}
{%- if xml_tools or tools %}{{ '### Tools\\n\\n<tools>' }}
{%- for tool in xml_tools or tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each call:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') }}
{%- else %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}{% endif %}
{{- (m.content or '').lstrip('\\n') + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') }}
{%- endif %}""",
}


@dataclass(frozen=True, slots=True)
class Ends:
    """Where texts begin and turns end in a family; `others` are tokens that end a turn besides the first."""

    bos: str | None
    eos: str
    others: tuple[str, ...] = ()


CHATML = Ends(None, "<|im_end|>", ("<|endoftext|>",))
ENDS = {  # by how the family's name begins; the longest that fits is taken
    "": CHATML,
    "cohere": Ends("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Ends("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    "gemma": Ends("<bos>", "<end_of_turn>", ("<eos>",)),
    "gemma4": Ends("<bos>", "<turn|>", ("<eos>", "<|tool_response>")),
    "diffusion_gemma": Ends("<bos>", "<turn|>", ("<eos>", "<|tool_response>")),
    "glm4": Ends(None, "<|endoftext|>", ("<|user|>", "<|observation|>")),
    "gptoss": Ends("<|startoftext|>", "<|return|>", ("<|call|>", "<|endoftext|>")),
    "idefics3": Ends("<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": Ends("<|startoftext|>", "<|im_end|>"),
    "llama3": Ends("<|begin_of_text|>", "<|eot_id|>", ("<|eom_id|>", "<|end_of_text|>")),
    "llava": Ends("<s>", "</s>"),
    "mistral": Ends("<s>", "</s>"),
    "mixtral": Ends("<s>", "</s>"),
    "muse": Ends("<|begin_of_text|>", "<|eot|>", ("<|eom|>",)),
    "olmo2": Ends("<|endoftext|>", "<|endoftext|>"),
    "phi3": Ends("<s>", "<|end|>", ("<|endoftext|>",)),
    "smolvlm": Ends("<|im_start|>", "<end_of_utterance>"),
}


@cache
def template_files() -> dict[str, Path]:
    """Return the files of TRL's templates by their names; the package itself is not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the files of trl are not installed: run make setup")
    return {file.stem: file for file in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))}


def families(*, training: bool = False) -> dict[str, str]:
    """Return Jinja sources by the names of families; `training` adds the variants that mark what is learnt."""
    files = {name: file for name, file in template_files().items() if training or not name.endswith(TRAINING)}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()} | OWN


def template_of(family: str, *, marks: bool = True) -> str:
    """Return a family's Jinja source, if need be without the marks around what is learnt."""
    source = families(training=True)[family]
    return source if marks else GENERATION.sub("", source)


def ends_of(family: str) -> Ends:
    return ENDS[max((begin for begin in ENDS if family.startswith(begin)), key=len)]


def tokenizer_of(family: str, *, marks: bool = True) -> PreTrainedTokenizerFast:
    """Make a tokenizer with the family's template: one token per byte, and one for each marker of the template."""
    source, ends = template_of(family, marks=marks), ends_of(family)
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = sorted({*SPECIAL.findall(source), *ends.others, ends.eos, "<pad>"} | ({ends.bos} if ends.bos else set()))
    bare.add_special_tokens([*special, *EXTRA.get(family, ())])
    bare.add_tokens(sorted(set(ADDED.findall(source))))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        pad_token="<pad>",
        bos_token=ends.bos,
        eos_token=ends.eos,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = source
    return tokenizer


LFM_CALL = ("<|tool_call_start|>", "<|tool_call_end|>")
EXTRA = {
    "lfm2": LFM_CALL,
    "llama3_2": ("<|python_tag|>",),
    "gptoss": ("<|constrain|>",),
}  # which the template does not write
