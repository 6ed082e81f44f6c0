"""Write the tables of docs/benchmarks.md and docs/cluster.md from the files in benchmarks/results.

    python benchmarks/tables.py [--check]

Each is between `<!-- NAME -->` and `<!-- / -->`; NAME is that of a file. With --check nothing is written, and
the exit status is 1 if a table is not what its file says.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / name for name in ("benchmarks.md", "cluster.md")]
MARKED = re.compile(r"<!-- (\w+) -->\n.*?<!-- / -->", re.DOTALL)
NAMES = {"trueline": "Trueline", "trl": "TRL"}
Found = dict[str, Any]


def table(*rows: tuple[str, ...]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others])


def steps(found: Found) -> str:
    rows = [("", "seconds a step", "sampled tokens a second", "in use")]
    for key, name in NAMES.items():
        side = found[key]
        phases = ", ".join(f"{phase} {value:.1f}" for phase, value in side["phases"].items() if value >= 0.05)
        seconds = f"{side['seconds']:.1f}" + (f" ({phases})" if phases else "")
        used = f"{side['gib']:.1f} GiB" if side["gib"] else "not measured"
        rows.append((name, seconds, f"{side['tokens'] / side['seconds']:.0f}", used))
    caveat = "" if found["counts"] else " Mean lengths differ by more than 10 %, so this does not count."
    per_token = f"; per token: {found['token_ratio']:.2f}" if "token_ratio" in found else ""
    return f"{table(*rows)}\n\nSeconds per step: {found['step_ratio']:.2f} of TRL's{per_token}.{caveat}"


def modes(found: Found) -> str:
    runs = {mode: of for mode, of in found.items() if mode != "command"}
    speeds = {mode: median(one["samples_per_second"] for one in of) for mode, of in runs.items()}
    first = next(iter(speeds.values()))
    rows = [("`max_staleness`, `on_update`", "samples a second", "", "reward")]
    for mode, of in runs.items():
        number, _, name = mode.partition(" ")
        rewards = [one["reward"] for one in of]
        called = f"{number}, `{name}`" if name else "0"
        speed = f"{speeds[mode]:.1f}", f"{speeds[mode] / first:.2f}"
        rows.append((called, *speed, f"{min(rewards):.3f} to {max(rewards):.3f}"))
    return table(*rows)


def sampling(found: Found) -> str:
    speeds = f"{found['vllm']:.0f}", f"{found['pool']:.0f}", f"{found['ratio']:.2f}"
    return table(("tokens a second: vLLM's `generate`", "Trueline's pool", "ratio"), speeds)


def training(found: Found) -> str:
    rows = [("tokens a second", "bare, all in bfloat16", "bare, the same float32 sums", "Trueline", "of the latter")]
    for name in ("plain", "checkpointed"):
        of = found[name]
        rows.append((name, *(f"{of[side]:.0f}" for side in ("rough", "bare", "ours")), f"{of['ratio']:.3f}"))
    return table(*rows)


def engines(found: Found) -> str:
    clock = "processor" if "CPU" in found["machine"] else "ratio"  # other programs slow a side on a CPU
    speed = "tokens_per_processor_second" if clock == "processor" else "tokens_per_second"
    rows = [("layers", "side", speed.replace("_", " "), "of the bare loop: median, range", "peak memory")]
    for mode, sides in found["modes"].items():
        for side, of in sides.items():
            ratio = "{:.2f}, {:.2f} to {:.2f}".format(of[clock], *of[f"{clock}_range"])
            rows.append((mode, f"`{side}`", f"{of[speed]:.0f}", ratio, f"{of['gib']:.2f} GiB"))
    return table(*rows)


def prefixes(found: Found) -> str:
    speeds = (f"{found['tokens_per_second'][side]:.0f}" for side in ("whole", "shared"))
    gap, rounding = (f"{found['gaps'][side]['gradient']:.4f}" for side in ("shared", "halves"))
    head = (
        "tokens a second: every sequence whole",
        "prompts once",
        "ratio",
        "gradients differ by",
        "by rounding alone",
    )
    return table(head, (*speeds, f"{found['ratio']:.2f}", gap, rounding))


def episodes(found: Found) -> str:
    speeds = f"{found['continuous']:.1f}", f"{found['lockstep']:.1f}", f"{found['ratio']:.1f}"
    return table(("continuous admission", "lockstep", "ratio"), speeds)


def routing(found: Found) -> str:
    rows = [
        ("experts of the trainer", "gap, same weights: mean, largest", "gap, older weights: mean, largest", "agreement")
    ]
    for key, name in {"own": "its own", "replayed": "the engine's"}.items():
        of = found[key]
        gaps = (f"{of[f'{which}gap_mean']:.4f}, {of[f'{which}gap_max']:.2f}" for which in ("first_", ""))
        rows.append((name, *gaps, f"{of['first_agreement']:.3f}, {of['agreement']:.3f}"))
    return table(*rows)


def simulated(found: Found) -> str:
    rows = [("`max_staleness`, `on_update`", "completions a second", "step", "engines decode", "sequences each")]
    for mode, one in ((mode, of) for mode, of in found.items() if mode != "command"):
        number, _, name = mode.partition(" ")
        speed, seconds = f"{one['samples_per_second']:.0f}", f"{one['step_seconds']:.0f} s"
        called = f"{number}, `{name}`" if number != "0" else "0"
        rows.append((called, speed, seconds, f"{one['decoding_share']:.0%}", f"{one['sequences']:.0f}"))
    return table(*rows)


def predictions(found: Found) -> str:
    rows = [("`max_staleness`, `on_update`", "completions a second, predicted", "measured", "ratio")]
    for mode, one in ((mode, of) for mode, of in found.items() if mode != "command"):
        number, _, name = mode.partition(" ")
        speeds = f"{one['predicted']:.1f}", f"{one['measured']:.1f}", f"{one['ratio']:.2f}"
        rows.append((f"{number}, `{name}`" if name else "0 (the calibration)", *speeds))
    return table(*rows)


TABLES: dict[str, Callable[[Found], str]] = {
    "rl_step_cpu": steps,
    "rl_step_h200": steps,
    "rl_step_random_h200": steps,
    "sampling_h200": sampling,
    "train_throughput_h200": training,
    "training_engines_cpu": engines,
    "shared_prefix_h200": prefixes,
    "asynchrony_cpu": modes,
    "agents_cpu": episodes,
    "routing_replay_h200": routing,
    "simulate_1000": simulated,
    "simulate_cpu": predictions,
}


def fill_tables(page: str) -> str:
    def fill(hit: re.Match[str]) -> str:
        found = json.loads((ROOT / "benchmarks" / "results" / f"{hit[1]}.json").read_text())
        return f"<!-- {hit[1]} -->\n{TABLES[hit[1]](found)}\n<!-- / -->"

    return MARKED.sub(fill, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    pages = {page: page.read_text() for page in PAGES}
    if parser.parse_args().check:
        return int(any(fill_tables(text) != text for text in pages.values()))
    for page, text in pages.items():
        page.write_text(fill_tables(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
