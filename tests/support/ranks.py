"""Run one function on several ranks: real processes, real gloo."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueline.runtime.cluster import this_machine, worker_environment
from trueline.runtime.transport import free_address

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(function: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """What `function(rank, world, address, *args)` returns on each rank; a failing rank fails the test."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.pickle").write_bytes(pickle.dumps((function, world, free_address(), args)))
    environment = os.environ | worker_environment(this_machine(), world) | {"PYTHONPATH": str(ROOT)}
    processes = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.support.ranks", str(folder), str(rank)]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = [process.wait(timeout=600) for process in processes]
    for rank, code in enumerate(codes):
        assert code == 0, (folder / f"{rank}.log").read_text()[-4000:]
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    function, world, address, args = pickle.loads((folder / "call.pickle").read_bytes())
    result = function(rank, world, address, *args)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
