"""The demo's own model, tokenizer and data: nothing is downloaded."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LARGEST = 99
HELD_OUT = 400
WARM_START = 2000


def make_model(folder: Path, seed: int) -> int:
    """A random Llama of one million parameters that reads and writes characters; returns their number."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special ones."""
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>"])}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_data(folder: Path, seed: int) -> None:
    """All sums of two numbers up to 99, split into a warm start, practice and a held-out part."""
    pairs = [(left, right) for left in range(LARGEST + 1) for right in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    held_out, rest = pairs[:HELD_OUT], pairs[HELD_OUT:]
    write_rows(folder / "held_out.jsonl", held_out)
    write_rows(folder / "practice.jsonl", rest)
    write_rows(folder / "warm_start.jsonl", rest[:WARM_START])


def write_rows(file: Path, pairs: list[tuple[int, int]]) -> None:
    rows = [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
