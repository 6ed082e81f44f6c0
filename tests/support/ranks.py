"""Run one function on several ranks: real processes, real gloo."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trueline.config.model import RanksConfig
from trueline.runtime.cluster import machine_at_hand
from trueline.runtime.placement import process_environment
from trueline.training.worker import Worker, worker_target

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, groups: Sequence[Path] = ()
) -> list[Any]:
    """What `function(rank, world, *args)` returns on each rank; a failing rank fails the test.

    With `groups`, each rank is born into a control group of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.pickle").write_bytes(pickle.dumps((function, world, args)))
    own = process_environment(
        worker_target(RanksConfig(engine="deepspeed", zero_stage=3 if groups else 2)), machine_at_hand(), world
    )
    environment = os.environ | own | {"PYTHONPATH": str(ROOT)}
    processes = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.support.ranks", str(folder), str(rank)]
        if groups:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(groups[rank] / "cgroup.procs"), *command]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = [process.wait() for process in processes]
    for rank, code in enumerate(codes):
        assert code == 0, (folder / f"{rank}.log").read_text()[-4000:]
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def started(worker: Worker) -> Worker:
    """Rank 0 tells the others by a file where to meet."""
    place = Path("address.json")
    if worker.spec.rank == 0:
        written = place.with_suffix(".tmp")
        written.write_text(json.dumps(worker.listen()))
        written.rename(place)
    while not place.exists():
        time.sleep(0.05)
    host, port = json.loads(place.read_text())
    worker.start((host, port))
    return worker


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    function, world, args = pickle.loads((folder / "call.pickle").read_bytes())
    os.chdir(folder)
    result = function(rank, world, *args)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
