"""RL steps with three flags on one GPU: what the plan forecasts of its memory, phase by phase, and what is in use.

    python benchmarks/gpu_memory.py FOLDER [--shape 135M | 1.5B | 7B | tiny] [--model PATH] [--steps 3] [key=value ...]

Without --model, one of that shape with random weights is made in FOLDER; a second run there takes it up again. Prompts
are short and completions have 512 tokens. Exits 1 if forecast and peak differ by more than 15 % of the peak.
"""

import shutil
import sys
from pathlib import Path

from random_model import SHAPES, make_model, make_parser, make_prompts, run_words

from trueline import cli
from trueline.api import quiet_libraries
from trueline.config.rl import RLConfig
from trueline.files import read_rows
from trueline.plan.describe import memory_lines
from trueline.plan.memory import GIB, Forecast
from trueline.plan.rl import plan_rl

LARGEST_GAP = 0.15  # of the peak


def forecast_memory(words: list[str]) -> Forecast:
    """Plan the run as its start will."""
    options, options.overrides = cli.make_parser().parse_known_args(words)
    config = cli.load_options(options)
    assert isinstance(config, RLConfig)
    plan = plan_rl(config)
    plan.rewards.close()
    return plan.forecast


def report(forecast: Forecast, run: Path) -> int:
    rows = [row for row in read_rows(run / "metrics.jsonl") if "memory/device_gib" in row]
    if forecast.room.device == "cpu" or not rows:
        print("no GPU: nothing was forecast or measured")
        return 0
    print(*memory_lines(forecast))
    expected = {name: size / GIB for name, size in forecast.room.phases(forecast.choice).items()}
    phases = {name: f"memory/{name}_gib" for name in ("start", "rollout", "training")}
    for name, key in phases.items():
        used = max((row[key] for row in rows if key in row), default=0.0)
        print(f"{name:<10} forecast {expected.get(name, 0.0):6.1f} GiB, in use {used:6.1f} GiB")
    print(f"policy     peak of its tensors {max(row['memory/peak_gib'] for row in rows):.1f} GiB")
    peak = max(row["memory/device_gib"] for row in rows)
    most = max(expected[name] for name in phases if name in expected)
    print(f"all        forecast {most:6.1f} GiB, in use {peak:6.1f} GiB: {most / peak - 1:+.1%}")
    for row in rows:
        print("step", row["step"], *(f"{key[5:]} {value:.2f}" for key, value in row.items() if key.startswith("time/")))
    return int(abs(most / peak - 1) > LARGEST_GAP)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model or folder / f"model-{options.shape}"
    if not model.exists():
        make_model(model, options.shape)
    make_prompts(folder)
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = [*run_words(folder, options.steps), f"model.path={model}", "rollout.max_new_tokens=512", *overrides]
    quiet_libraries()
    forecast = forecast_memory(["grpo", *words])
    return cli.main(["grpo", *words]) or report(forecast, folder / "run")


if __name__ == "__main__":
    sys.exit(main())
