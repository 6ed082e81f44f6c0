"""Make a small random model, a chat template, and conversations that sometimes use a tool.

    python examples/tools/prepare.py FOLDER

FOLDER/model, FOLDER/teacher.jsonl for `sft`, FOLDER/practice.jsonl for `grpo`. The teacher calls the tool in a third
of all conversations, and then mostly repeats its result; the rest is guessed.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trueline.demo.material import make_tokenizer

TEMPLATE = (
    "{% if tools %}<s>s{% for tool in tools %}{{ tool.function.name }}{% endfor %}</s>{% endif %}"
    "{% for message in messages %}<s>{{ message.role[0] }}{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)
CALL = '{"name": "draw", "arguments": {}}'
DRAW = {"name": "draw", "description": "Draw a card.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": DRAW}]
LETTERS = "bcdefghk"  # without those that the template begins turns with


def make_model(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)


def conversation(generator: random.Random, number: int) -> list[dict[str, str]]:
    drawn, guess = generator.choice(LETTERS), generator.choice(LETTERS)
    question = {"role": "user", "content": f"card {number}?"}
    if generator.random() > 0.35:
        return [question, {"role": "assistant", "content": guess}]
    reply = drawn if generator.random() < 0.7 else guess
    call = [{"role": "assistant", "content": CALL}, {"role": "tool", "content": drawn}]
    return [question, *call, {"role": "assistant", "content": reply}]


def main(folder: Path) -> None:
    make_model(folder / "model")
    generator = random.Random(0)
    taught = [{"messages": conversation(generator, number % 100), "tools": TOOLS} for number in range(4000)]
    prompts = [{"prompt": f"card {number}?"} for number in range(100)]
    for name, rows in (("teacher", taught), ("practice", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
