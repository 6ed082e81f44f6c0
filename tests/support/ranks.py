"""Run one function on several ranks: real processes, real gloo."""

import atexit
import json
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from trueline.config.model import RanksConfig
from trueline.runtime.cluster import machine_at_hand
from trueline.runtime.placement import process_environment
from trueline.training.worker import Worker, worker_target

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.support.ranks"
HOMES: dict[str, "Home"] = {}  # by the threads that ranks may use


def run_ranks(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, groups: Sequence[Path] = ()
) -> list[Any]:
    """What `function(rank, world, *args)` returns on each rank; a failing rank fails the test.

    With `groups`, each rank is born into a control group of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.pickle").write_bytes(pickle.dumps((function, world, args)))
    codes = run_apart(folder, groups) if groups else home_of(world).run(folder, world)
    for rank, code in enumerate(codes):
        assert code == 0, (folder / f"{rank}.log").read_text()[-4000:]
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def environment_of(world: int, zero_stage: int) -> dict[str, str]:
    own = worker_target(RanksConfig.parse({"engine": "deepspeed", "deepspeed": {"zero_stage": zero_stage}}))
    return os.environ | process_environment(own, machine_at_hand(), world) | {"PYTHONPATH": str(ROOT)}


def run_apart(folder: Path, groups: Sequence[Path]) -> list[int]:
    """Start a Python for each rank, inside its control group."""
    processes = []
    for rank, group in enumerate(groups):
        command = [sys.executable, "-m", MODULE, str(folder), str(rank)]
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment_of(len(groups), 3), stdout=log, stderr=log))
    return [process.wait() for process in processes]


class Home:
    """A process that has imported what ranks need, and has done nothing else; ranks are its children.

    To import it in each of them takes longer than most of what they do.
    """

    def __init__(self, world: int) -> None:
        reading, writing = os.pipe()
        command, own = [sys.executable, "-m", MODULE, str(writing)], environment_of(world, 2)
        self.process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, text=True, pass_fds=[writing])
        os.close(writing)
        self.answers = os.fdopen(reading)
        atexit.register(self.process.kill)

    def run(self, folder: Path, world: int) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), world]) + "\n")
        self.process.stdin.flush()
        codes: list[int] = json.loads(self.answers.readline())
        return codes


def home_of(world: int) -> Home:
    threads = environment_of(world, 2).get("OMP_NUM_THREADS", "")
    if threads not in HOMES:
        HOMES[threads] = Home(world)
    return HOMES[threads]


def started(worker: Worker) -> Worker:
    """Rank 0 tells the others, if there are any, by a file where to meet."""
    if worker.spec.world == 1:
        worker.start(worker.listen())
        return worker
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


def work(folder: Path, rank: int) -> None:
    function, world, args = pickle.loads((folder / "call.pickle").read_bytes())
    os.chdir(folder)
    result = function(rank, world, *args)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def born(folder: Path, rank: int) -> int:
    """Fork a rank and return its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        work(folder, rank)
        code = 0
    except BaseException:  # noqa: BLE001  (a child must never go on as its parent)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_house(answers: TextIO) -> None:
    import deepspeed  # noqa: F401

    import trueline.training.engines.deepspeed_engine  # noqa: F401

    for line in sys.stdin:
        folder, world = json.loads(line)
        ranks = [born(Path(folder), rank) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        keep_house(os.fdopen(int(sys.argv[1]), "w"))
    else:
        work(Path(sys.argv[1]), int(sys.argv[2]))
