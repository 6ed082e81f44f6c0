"""A folder of models, data and rewards, sound and broken, and what the doctor says of a run made of them."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TEMPLATE
from trueline.api import examine
from trueline.cli import load_options, make_parser
from trueline.config.base import ConfigError
from trueline.demo.material import make_tokenizer
from trueline.doctor.table import Findings, refusal
from trueline.monitoring.findings import Finding

TURN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
LAST_ONLY = "{% set message = messages[-1] %}<{{ message.role }}>{{ message.content }}</s>\n"
TEMPLATES = {
    "chat": TURN + OPEN,
    "tools": TOOL_TEMPLATE,
    "endless": TURN.replace("</s>", "") + OPEN,
    "unopened": TURN,
    "forgetful": LAST_ONLY + OPEN,
    "twice": "<s><s>" + TURN + OPEN,
}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARDS = """
import time


def right(reply, label):
    return float(str(label) in reply)


def letters(reply):
    return sum("a" <= character <= "z" for character in reply) / 8


def digits(reply):
    return sum(character.isdigit() for character in reply)


def phrased(reply):
    return float("the answer is" in reply)


def slow(reply):
    time.sleep(0.2)
    return len(reply)


def raises(reply, label):
    return {"good": 1.0}[reply]


def constant(reply, label):
    return 0.5


def blind(reply):
    return 0.5


def called(reply, turns):
    return float(any(turn["role"] == "tool" for turn in turns))


def inverted(reply, label):
    return float(str(label) not in reply)


def equal(reply, label):
    return float(reply == label)


def hangs(reply, label):
    time.sleep(60)


def tagged(reply, label):
    return float(f"<answer>{label}</answer>" in reply)
"""
SUMS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(100)]
NAMES = ["a long name", "another name", "one name more", "the last name"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sums": SUMS,
    "held_out": [{"prompt": f"{number}+2=", "answer": str(number + 2)} for number in range(10)],
    "leaked": [*SUMS[:5], {"prompt": "1+2=", "answer": "3"}],
    "repeated": SUMS + SUMS[:20],
    "contrary": [*SUMS, {"prompt": "1+1=", "answer": "3"}],
    "unlabelled": [*SUMS, {"prompt": "what?", "answer": " "}],
    "spaced": [row | {"prompt": f"{row['prompt']} "} for row in SUMS],
    "alike": [row | {"answer": "7"} for row in SUMS],
    "mixed": [*SUMS, {"prompt": "what?", "answer": 7}],
    "numbers": [row | {"answer": int(row["answer"])} for row in SUMS],
    "told": [{"prompt": f"Say {name}.", "answer": name} for name in NAMES],
    "rendered": [row | {"prompt": f"<s><user>{row['prompt']}</s>"} for row in SUMS],
    "wordy": [row | {"answer": f"the answer is {row['answer']}"} for row in SUMS],
    "frage": [{"frage": "1+1=", "antwort": "2"}],
    "pairs": [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in SUMS],
    "rated": [
        {"prompt": row["prompt"], "completion": row["answer"], "label": at % 2 == 0} for at, row in enumerate(SUMS)
    ],
    "bare": [{"prompt": f"{number}:"} for number in range(100)],
}

GAME = """
class Game:
    def reset(self, prompt, label):
        self.label = label

    def step(self, reply):
        return float(self.label in reply)
"""


def make_clinic(folder: Path) -> Path:
    make_tiny_model(folder / "model", tied=True)
    for name, template in TEMPLATES.items():
        copy(folder, name, chat_template=template)
    copy(folder, "padded", pad_token="</s>")
    copy(folder, "wide", more=["<one>", "<two>"])
    copy(folder, "starting", chat_template="<s>" + TEMPLATES["chat"], starts=True)
    change(copy(folder, "disagreeing", chat_template=TEMPLATES["chat"]) / "generation_config.json", eos_token_id=0)
    make_shape(folder / "smol", hidden=576, layers=30, words=49152)
    make_shape(folder / "huge", hidden=16384, layers=100, words=300)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARDS)
    (folder / "game.py").write_text(GAME)
    (folder / "runs" / "taken").mkdir(parents=True)
    packages = {"vllm": "0.1.0", "pynvml": "1.0", "nvidia-ml-py": "1.0"}
    for name, version in packages.items():
        place = folder / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def copy(folder: Path, name: str, **words: Any) -> Path:
    """The tiny model with another tokenizer: its template, or special tokens."""
    shutil.copytree(folder / "model", folder / name)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = words.get("chat_template")
    tokenizer.pad_token = words.get("pad_token", tokenizer.pad_token)
    tokenizer.add_tokens(words.get("more", []))
    if words.get("starts"):
        first = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = first
    tokenizer.save_pretrained(folder / name)
    return folder / name


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def make_shape(folder: Path, *, hidden: int, layers: int, words: int) -> None:
    """A model with the name of its weights and none of their bytes; its turns end as those of SmolLM2."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=9 if hidden % 9 == 0 else 8,
        num_key_value_heads=3 if hidden % 9 == 0 else 8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    shape.save_pretrained(folder)
    size = hidden * words + layers * 4 * hidden * hidden * 3
    head = json.dumps({"all": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(folder / "model.safetensors", 8 + len(head) + 4 * size)  # of zeros that take no room


def diagnosed(words: str) -> list[Finding]:
    """All that the doctor says of a command."""
    local = ["runtime=local"] if "runtime=" not in words else []
    return [one for findings in diagnosed_words([*words.split(), *local]).values() for one in findings]


def diagnosed_words(words: list[str]) -> Findings:
    """All that the doctor says of a command, by family."""
    options, options.overrides = make_parser().parse_known_args(["doctor", *words])
    try:
        config = load_options(options)
    except ConfigError as error:
        return {"plan": [refusal(error)]}
    return examine(options.verb, config, resume=options.resume, deep=options.deep)
