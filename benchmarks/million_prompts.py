"""Seconds to the end of the first step, and time and memory of the driver, with many prompts and with a thousand.

    python benchmarks/million_prompts.py FOLDER [--prompts 1000000] [--formats jsonl parquet arrow] [--out FILE]

Each run is a process of its own: one step of GRPO in `runtime=local` with a tiny random model, a chat template and an
empty cache. Seconds are counted from the start of the process to the row of the first step in metrics.jsonl; memory is
the largest resident set of the process until then. Processor time is that of the driver, all threads together, which
other programs on the machine hardly change. A thousand prompts, as JSON lines, are run first and last; the
last of both counts, because the first run of a machine also reads the libraries from disk.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
from random_model import REWARD, make_model, make_parser, read_steps, run_words, write_result

FEW, BLOCK = 1000, 10_000
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_rows(count: int) -> Iterator[list[dict[str, str]]]:
    """Yield blocks of rows with questions of 50 to 150 characters."""
    generator = random.Random(0)
    for start in range(0, count, BLOCK):
        words = [generator.choices("abcdefgh 0123456789", k=generator.randint(50, 150)) for _ in range(BLOCK)]
        rows = [{"prompt": "".join(word), "answer": str(start + at)} for at, word in enumerate(words)]
        yield rows[: count - start]


def write_data(file: Path, count: int) -> None:
    schema = arrow.schema({"prompt": arrow.string(), "answer": arrow.string()})
    if file.suffix == ".jsonl":
        with file.open("w") as lines:
            for rows in make_rows(count):
                lines.writelines(json.dumps(row) + "\n" for row in rows)
        return
    opened = parquet.ParquetWriter(file, schema) if file.suffix == ".parquet" else arrow.ipc.new_file(str(file), schema)
    with opened as writer:
        for rows in make_rows(count):
            writer.write_table(arrow.Table.from_pylist(rows, schema))


def run(folder: Path, data: Path, name: str) -> dict[str, float]:
    """Run one step; return the seconds until it was written down, and the driver's largest memory until then."""
    keys = ["runtime=local", "rollout.engine=hf", "rollout.max_new_tokens=8", "prompts_per_step=4"]
    keys += ["algorithm.group_size=4", "checkpoint.save=false", f"data.chat_template={folder}/chat.jinja"]
    words = [*run_words(folder, 1, name=name), *keys, f"data.path={data}"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / f"cache_{name}")}
    began = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trueline.cli", "grpo", *words], stdout=log, stderr=log, env=environment
        )
    while process.poll() is None:
        used = {"cpu_seconds": processor_seconds(process.pid), "gib": peak_memory(process.pid)}
        if read_steps(folder / name):
            break
        time.sleep(0.05)
    seconds = time.monotonic() - began
    if process.wait() or not read_steps(folder / name):
        raise SystemExit((folder / f"{name}.log").read_text())
    return {name: round(value, 2) for name, value in {"seconds": seconds, **used}.items()}


def peak_memory(process: int) -> float:
    """Return the largest resident set of a process so far, in GiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")] or ["0"]
    return int(peak) / 2**20


def processor_seconds(process: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "parquet", "arrow"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    make_model(folder / "model", "tiny")
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "reward.py").write_text(REWARD)
    write_data(few := folder / "few.jsonl", FEW)
    run(folder, few, "first")
    found: dict[str, Any] = {}
    for kind in given.formats:
        write_data(many := folder / f"many.{kind}", given.prompts)
        found[kind] = run(folder, many, kind)
    found["few"] = run(folder, few, "few")
    for name, one in found.items():
        more = {key: one[key] - found["few"][key] for key in one}
        print(f"{name}: " + ", ".join(f"{key} {one[key]:.1f} ({more[key]:+.1f})" for key in one))
    write_result(given.out, {"prompts": given.prompts, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
