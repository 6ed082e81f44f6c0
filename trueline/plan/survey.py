"""Measure all prompts of a large dataset in the background, once for each content: other runs find the lengths."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from trueline.config.base import ConfigError, Tree
from trueline.config.data import PromptDataConfig
from trueline.config.model import ModelConfig
from trueline.data.chat import ChatFormat
from trueline.data.prompts import UNKNOWN, UNREADABLE, LazyPrompts, prompt_lengths, reader_of
from trueline.data.rows import content_digest
from trueline.data.sources import cache_folder, find_rows
from trueline.models.loading import load_chat
from trueline.usercode.host import STARTER
from trueline.usercode.linux import die_with_parent

BLOCK = 1000  # prompts measured at a time
CORES_EACH, MOST_PROCESSES = 8, 8
LAST_IN_LINE = 19  # niceness: only with time that nobody else wants
KIND = np.dtype("<i4")
Processes = list[subprocess.Popen[bytes]]


def lengths_file(prompts: LazyPrompts, chat: ChatFormat) -> Path | None:
    """Return the file of all lengths, by everything they follow from; None where that cannot be told."""
    content = content_digest(prompts.rows)
    if not content or not chat.tokenizer.is_fast:
        return None
    template = [chat.template.source, chat.template.arguments, chat.tokenizer.special_tokens_map] * chat.templated
    reader = replace(prompts.reader, source="")
    parts = [content, len(prompts), asdict(reader), prompts.tools, template]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    digest.update(chat.tokenizer.backend_tokenizer.to_str().encode())
    return cache_folder() / "lengths" / digest.hexdigest()


def known_lengths(prompts: LazyPrompts, chat: ChatFormat) -> np.ndarray | None:
    """Return the lengths that earlier runs have measured; None if there are none."""
    file = lengths_file(prompts, chat)
    if file is None or not file.exists() or file.stat().st_size != len(prompts) * KIND.itemsize:
        return None
    return np.fromfile(file, KIND)


@contextmanager
def survey(prompts: LazyPrompts, data: PromptDataConfig, model: ModelConfig, log: Path) -> Iterator[Processes]:
    """Let other processes measure what is not yet known, as long as the run lasts."""
    assert prompts.limit is not None
    file = lengths_file(prompts, prompts.limit.chat)
    if file is None or not make_lengths(file, len(prompts)):
        yield []
        return
    prompts.limit.lengths = lengths = np.memmap(file, KIND, "r")
    if not (lengths == UNKNOWN).any():
        yield []
        return
    count = min(max((os.cpu_count() or 1) // CORES_EACH, 1), MOST_PROCESSES)
    task: Tree = {"data": data.model_dump(), "model": model.model_dump(), "tools": prompts.tools, "file": str(file)}
    task |= {"path": prompts.reader.source, "key": data.source_key(), "content": content_digest(prompts.rows)}
    task |= {"nice": LAST_IN_LINE, "step": count}
    processes = [STARTER.submit(start, task | {"first": at}, log).result() for at in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_lengths(file: Path, rows: int) -> bool:
    """Make a file without any length, unless it is there; tell whether it can be written to."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.stat().st_size != rows * KIND.itemsize:
            np.full(rows, UNKNOWN, KIND).tofile(file)
    except OSError:
        return False  # then prompts are measured as they are drawn
    return os.access(file, os.W_OK)


def start(task: Tree, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as written:
        command = [sys.executable, "-m", "trueline.plan.survey"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=written, stderr=written)
    assert process.stdin is not None
    with process.stdin as line:
        line.write(json.dumps(task).encode())
    return process


# In the process


def main() -> None:
    die_with_parent()
    task: dict[str, Any] = json.load(sys.stdin)
    os.nice(task["nice"])
    data = PromptDataConfig.parse(task["data"])
    rows = find_rows(task["path"], task["key"])
    if content_digest(rows) != task["content"]:
        return  # the run will find out by itself
    prompts = LazyPrompts(rows, reader_of(rows, data, task["path"]), [], task["tools"])
    chat = load_chat(ModelConfig.parse(task["model"]), data.chat_template, data.chat_template_kwargs)
    lengths = np.memmap(task["file"], KIND, "r+")
    for start in range(task["first"] * BLOCK, len(prompts), task["step"] * BLOCK):
        numbers = range(start, min(start + BLOCK, len(prompts)))
        if (lengths[numbers.start : numbers.stop] == UNKNOWN).any():
            lengths[numbers.start : numbers.stop] = measure_block(prompts, numbers, chat)


def measure_block(prompts: LazyPrompts, numbers: range, chat: ChatFormat) -> list[int]:
    try:
        return prompt_lengths([prompts[number] for number in numbers], chat)
    except ConfigError:
        return [measure_one(prompts, number, chat) for number in numbers]


def measure_one(prompts: LazyPrompts, number: int, chat: ChatFormat) -> int:
    try:
        return prompt_lengths([prompts[number]], chat)[0]
    except ConfigError:
        return UNREADABLE


if __name__ == "__main__":
    main()
