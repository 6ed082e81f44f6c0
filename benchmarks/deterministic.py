"""Two runs with deterministic=true, compared bit for bit, and what that costs beside a run without it.

    python benchmarks/deterministic.py MODEL FOLDER [--sides plain first second] [--steps 10] [key=value ...]

Each side is a run of gpu_learning.py with the same keys, one after the other; `first` and `second` have
deterministic=true. Sides that FOLDER has already are not run again. Compares the weights of both models and every array
that their steps were trained on (tokens, log-probs, advantages). Exits 1 if anything differs.
"""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from random_model import make_parser, read_steps, write_result

from trueline.training.kept_samples import FOLDER, read_arrays

LEARNING = Path(__file__).with_name("gpu_learning.py")
TWICE = ("first", "second")


def run_side(name: str, given: Any, keys: list[str]) -> None:
    exact = ["deterministic=true"] if name in TWICE else []
    words = [given.model, str(given.folder / name), "--steps", str(given.steps), "--least", "0", *exact, *keys]
    subprocess.run([sys.executable, str(LEARNING), *words], check=True)


def bits(run: Path) -> dict[str, str]:
    """Return a digest of every tensor file of the last model, and of every array that a step was trained on."""
    model = max((run / "checkpoints").glob("step_*/model"))
    found = {file.name: digest(file.read_bytes()) for file in sorted(model.glob("*.safetensors"))}
    for file in sorted((run / FOLDER).glob("step_*")):
        _, arrays = read_arrays(file)
        found |= {f"{file.stem} {name}": digest(array.tobytes()) for name, array in arrays.items()}
    return found


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def seconds(run: Path) -> float:
    """Return the median of the steps after the first two, which compile kernels."""
    times = [row["time/step"] for row in read_steps(run)]
    return median(times[2:] or times)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sides", nargs="+", default=["plain", *TWICE], choices=["plain", *TWICE])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given, keys = parser.parse_known_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.sides:
        if not (given.folder / name).exists():
            run_side(name, given, keys)
    runs = {name: given.folder / name / "run" for name in ("plain", *TWICE) if (given.folder / name).exists()}
    found: dict[str, Any] = {"seconds": {name: seconds(run) for name, run in runs.items()}}
    if {"plain", "first"} <= runs.keys():
        found["slowdown"] = found["seconds"]["first"] / found["seconds"]["plain"]
    differing: list[str] = []
    if runs.keys() >= set(TWICE):
        one, other = (bits(runs[name]) for name in TWICE)
        differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        found |= {"compared": len(one), "differing": differing}
    print(found)
    write_result(given.out, found)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
