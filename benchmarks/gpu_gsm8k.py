"""A real model learns GSM8K's word problems on one GPU, with the three flags and the few keys below.

    python benchmarks/gpu_gsm8k.py MODEL DATA FOLDER [--verb dppo] [--steps 100] [--every 25] [--tool] [--least 0.05]
        [--out FILE] [key=value ...]

MODEL is a folder with an instruction-tuned model, for instance Qwen2.5-Coder-0.5B-Instruct; DATA one with train.jsonl
and test.jsonl of GSM8K; FOLDER one that does not exist. All test rows are answered greedily before the first step,
every so many steps, and after the last one. With --tool the policy can call the calculator of examples/tools, by its
own template. Exits 1 if accuracy rises by less than --least, if the 95 % interval of its rise contains 0, or if a
finding was BAD.
"""

import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

from random_model import make_parser, read_steps, write_result

from trueline.cli import main as trueline
from trueline.files import read_rows
from trueline.monitoring.findings import FAILING

CALCULATOR = Path(__file__).resolve().parents[1] / "examples" / "tools" / "calculator.py"
KEYS = ("prompts_per_step=32", "rollout.max_new_tokens=512", "checkpoint.every=0")
SYSTEM = "data.system_prompt=Reason step by step, and put your final answer within \\boxed{}."
TOOL_SYSTEM = (
    "data.system_prompt=Solve the problem. Compute with the tool calculator, "
    "and put your final answer within \\boxed{}."
)


def summarize(run: Path) -> dict[str, Any]:
    """Return the curve of held-out accuracy, its rise with its 95 % interval, alarms, and the median step."""
    rows = read_rows(run / "metrics.jsonl")
    curve = [(row["step"], row["evaluation/reward"], row["evaluation/reward_ci95"]) for row in rows if held_out(row)]
    (_, before, wide), (_, after, narrow) = curve[0], curve[-1]
    findings = read_rows(run / "findings.jsonl") if (run / "findings.jsonl").exists() else []
    steps = read_steps(run)
    phases = {key for row in steps for key in row if key.startswith("time/")}
    return {
        "curve": curve,
        "rise": after - before,
        "rise_ci95": math.hypot(wide, narrow),  # as of two independent samples; the rows are the same, so it is less
        "alarms": [one["code"] for one in findings if one["level"] in FAILING],
        "worst_health": max(row.get("health/level", 0) for row in steps),
        "seconds": {key[5:]: median(row.get(key, 0.0) for row in steps) for key in sorted(phases)},
        "largest_gap": max(row["sync/canary_gap"] for row in rows if "sync/canary_gap" in row),
        "reward": [row["reward/mean"] for row in steps],
    }


def held_out(row: dict[str, Any]) -> bool:
    return "evaluation/reward_ci95" in row


def report(found: dict[str, Any], least: float) -> int:
    print(", ".join(f"step {step} {100 * value:.1f} +- {100 * ci:.1f} %" for step, value, ci in found["curve"]))
    print(f"rise {100 * found['rise']:.1f} points, 95 % within {100 * found['rise_ci95']:.1f} points of it")
    print(f"alarms {found['alarms']}, largest gap of log-probs {found['largest_gap']:.3f}")
    print("median seconds: " + ", ".join(f"{key} {value:.2f}" for key, value in found["seconds"].items()))
    risen = found["rise"] >= least and (least <= 0 or found["rise"] > found["rise_ci95"])
    return int(not risen or bool(found["alarms"]))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verb", default="grpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--tool", action="store_true")
    parser.add_argument("--least", type=float, default=0.05)
    parser.add_argument("--out", type=Path)
    given, overrides = parser.parse_known_args()
    folder, data = given.folder.resolve(), given.data.resolve()
    command = [given.verb, "--model", given.model, "--data", f"{data}/train.jsonl", "--reward", "math"]
    command += ["--eval-data", f"{data}/test.jsonl", f"evaluation.every={given.every}"]
    command += ["--tools", f"{CALCULATOR}:calculator", TOOL_SYSTEM] if given.tool else [SYSTEM]
    command += ["--name", "run", f"folder={folder}", f"steps={given.steps}"]
    if status := trueline([*command, *KEYS, *overrides]):
        return status
    found = summarize(folder / "run")
    write_result(given.out, found)
    return report(found, given.least)


if __name__ == "__main__":
    sys.exit(main())
