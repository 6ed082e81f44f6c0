"""Make a small random model, a chat template, and conversations in which a tool is used now and then.

    python examples/tools/prepare.py FOLDER

FOLDER/model, FOLDER/teacher.jsonl for `sft`, FOLDER/practice.jsonl for `grpo`. The teacher calls the tool in a third
of all conversations, and then mostly tells what it said; the rest is guessed.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}<s>s{% for tool in tools %}{{ tool.function.name }}{% endfor %}</s>{% endif %}"
    "{% for message in messages %}<s>{{ message.role[0] }}{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)
CALL = '{"name": "draw", "arguments": {}}'
DRAW = {"name": "draw", "description": "Draw a card.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": DRAW}]
LETTERS = "abcdefgh"


def make_model(folder: Path) -> None:
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>"])}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=len(made), max_position_embeddings=256, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)


def conversation(generator: random.Random, number: int) -> list[dict[str, str]]:
    drawn, guess = generator.choice(LETTERS), generator.choice(LETTERS)
    asked = {"role": "user", "content": f"card {number}?"}
    if generator.random() > 0.35:
        return [asked, {"role": "assistant", "content": guess}]
    told = drawn if generator.random() < 0.7 else guess
    called = [{"role": "assistant", "content": CALL}, {"role": "tool", "content": drawn}]
    return [asked, *called, {"role": "assistant", "content": told}]


def main(folder: Path) -> None:
    make_model(folder / "model")
    generator = random.Random(0)
    taught = [{"messages": conversation(generator, number % 100), "tools": TOOLS} for number in range(4000)]
    asked = [{"prompt": f"card {number}?"} for number in range(100)]
    for name, rows in (("teacher", taught), ("practice", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
