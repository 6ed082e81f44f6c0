"""Makes the demo's model, tokenizer and data; nothing is downloaded."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LEFT, RIGHT = range(1000), range(1, 10)  # half of these sums carry
HELD_OUT = 400
FORGETS = 0.7  # share of the carries that the teacher forgets: most, so that a student that imitates it does too


def make_model(folder: Path, seed: int) -> int:
    """Write a random Llama that reads and writes characters; return its number of parameters (about 1.8 million)."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": True}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **sizes, **heads, **ends}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte and three special tokens."""
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>"])}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_data(folder: Path, seed: int) -> None:
    """Write sums of a number up to 999 and a digit: held out, for practice, and as a forgetful teacher adds them."""
    generator = random.Random(seed)
    pairs = [(left, right) for left in LEFT for right in RIGHT]
    generator.shuffle(pairs)
    held_out, practice = pairs[:HELD_OUT], pairs[HELD_OUT:]
    held_out.sort(key=lambda pair: not carries(*pair))  # transcripts show the first ones
    write_rows(folder / "held_out.jsonl", held_out, [left + right for left, right in held_out])
    write_rows(folder / "practice.jsonl", practice, [left + right for left, right in practice])
    taught = [left + right - 10 * (carries(left, right) and generator.random() < FORGETS) for left, right in practice]
    write_rows(folder / "teacher.jsonl", practice, taught)


def carries(left: int, right: int) -> bool:
    return left % 10 + right >= 10


def write_rows(file: Path, pairs: list[tuple[int, int]], answers: list[int]) -> None:
    named = zip(pairs, answers, strict=True)
    rows = [{"prompt": f"{left}+{right}=", "answer": str(answer)} for (left, right), answer in named]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
