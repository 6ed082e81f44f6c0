"""What benchmarks share: models with random weights, prompts, a run of GRPO, its metrics, and results."""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from trueline.demo.material import make_tokenizer
from trueline.files import read_rows

REWARD = """
def reward(reply: str) -> float:
    return sum(character.isdigit() for character in reply) / max(len(reply), 1)
"""
LLAMA_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
SHAPES = {
    "7B": LLAMA_7B | {"num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "135M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 4096,
    },
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256},
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def read_size(text: str) -> tuple[int, int]:
    """Read PROMPTSxCOMPLETIONS."""
    prompts, group = map(int, text.split("x"))
    return prompts, group


def make_model(
    folder: Path, shape: str, kind: type[PreTrainedModel] = Qwen2ForCausalLM, vocabulary: int | None = None
) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    common = {"vocab_size": 1024 if shape == "tiny" else 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen2Config(
        **(common | SHAPES[shape] | ({"vocab_size": vocabulary} if vocabulary else {})),
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **({} if kind is Qwen2ForCausalLM else {"num_labels": 1}),
    )
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        model = kind._from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    model.save_pretrained(folder)
    del model
    if gpu:
        torch.cuda.empty_cache()  # this process may measure later what others take
    tokenizer.save_pretrained(folder)


def make_prompts(folder: Path) -> None:
    """Write prompts.jsonl, 256 of 100 characters, and reward.py, which likes digits."""
    generator = random.Random(0)
    rows = [{"prompt": "".join(generator.choices("abcdefgh 0123456789", k=100))} for _ in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def run_words(folder: Path, steps: int, reward: str = "reward.py:reward", name: str = "run") -> list[str]:
    """Return the words of a run on the model and prompts of a folder."""
    files = ["--model", f"{folder}/model", "--data", f"{folder}/prompts.jsonl", "--reward", f"{folder}/{reward}"]
    return [*files, "--name", name, f"folder={folder}", f"steps={steps}", "monitoring.tensorboard=false"]


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of the steps that trained."""
    return [row for row in read_rows(run / "metrics.jsonl") if "loss" in row]


def write_result(file: Path | None, found: dict[str, Any]) -> None:
    """Write the result and the arguments of a benchmark, if a file is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"command": sys.argv[1:], **found}, indent=1) + "\n")
