"""A kill at any moment leaves a good checkpoint, and what goes on from it is the run that nobody killed."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import programs
from tests.support.tiny import make_samples, make_tiny_model
from tests.support.whole import whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.run import CheckpointConfig
from trueline.models.ring_attention import Mesh
from trueline.runtime.actors import LocalActor
from trueline.training.checkpoints import UNFINISHED, Checkpoints
from trueline.training.group import ModelGroup, prepare_saving, write_models
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

KILLS = (3, 30)  # as a rule, and in a longer proof
RANKS = 2  # in one process; all learn the same, as those of a tensor-parallel group do, and each writes its share
MOST_SAVES = 3  # that a child starts before it is killed
SPAN = 1.1  # kills are spread over this many times the duration of a save
KEEP = 2
TRAINING = TrainingConfig(
    engine="torch", learning_rate=1e-3, schedule="linear", warmup_steps=5, weight_decay=0.1, ema_decay=0.9
)

Digests = dict[str, str]


class Course:
    """One training run in this process: step `n` learns samples that `n` alone determines."""

    def __init__(self, model: str, run: Path) -> None:
        torch.set_num_threads(1)
        config, steps = ModelConfig(path=model, dtype="float32"), KILLS[-1] * MOST_SAVES
        self.workers = [Worker(WorkerSpec(config, TRAINING, rank, RANKS, steps, seed=0)) for rank in range(RANKS)]
        actors = [LocalActor(f"model-{rank}", worker) for rank, worker in enumerate(self.workers)]
        self.group = ModelGroup("model", actors, TRAINING, timeout_seconds=60, mesh=Mesh(RANKS, tensor=RANKS))
        self.group.start()
        self.step, self.checkpoints = 0, checkpoints_of(run)
        newest = self.checkpoints.newest()
        if newest:
            self.group.call(Worker.load, str(newest))
            self.step = self.checkpoints.read_state(newest)["step"]
        prepare_saving([self.group])

    def learn(self) -> None:
        self.step += 1
        samples = make_samples(4, seed=self.step)
        set_weights(samples, "token_mean", 0)
        self.group.update(samples, "sft", LossSettings())

    def begin_to_save(self) -> None:
        self.checkpoints.save(self.step, {"step": self.step}, partial(write_models, {"": self.group}))

    def digests(self) -> Digests:
        """Of weights, moments and averages, which all ranks have alike."""
        first, *others = [self._digests(worker) for worker in self.workers]
        assert all(other == first for other in others)
        return first

    def _digests(self, worker: Worker) -> Digests:
        return {name: digest(tensor) for name, tensor in whole_state(worker.engine).items()}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def checkpoints_of(run: Path) -> Checkpoints:
    return Checkpoints(run, CheckpointConfig(keep=KEEP))


def learn_and_save(model: str, run: Path, saves: int, told: Connection) -> None:
    """Tells of every save that begins: its step, and the seconds of the save before it. Then waits for its end.

    The next step is learnt while the last one is written.
    """
    course, start, seconds = Course(model, run), 0.0, 0.0
    for _ in range(saves):
        course.learn()
        course.checkpoints.settle(wait=True)
        seconds = time.monotonic() - start if start else 0.0
        told.send((course.step, seconds))
        start = time.monotonic()
        course.begin_to_save()
    course.checkpoints.settle(wait=True)
    signal.pause()


def kill_within_a_save(model: str, run: Path, wait: Callable[[int, float], None], saves: int) -> int:
    """Kills a child once its last save has begun and `wait(step, seconds)` is over; that save's step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trueline.training.group", "transformers.models.llama.modeling_llama"])
    hear, tell = context.Pipe(duplex=False)
    child = context.Process(target=learn_and_save, args=(model, run, saves, tell), daemon=True)
    child.start()
    tell.close()
    for _ in range(saves):
        assert hear.poll(60), "the child makes no progress"
        step, seconds = hear.recv()
    wait(step, seconds)
    assert child.is_alive(), "the child ended by itself"
    child.kill()
    child.join()
    return int(step)


class Wait:
    """A share of the duration of a save, as the child last measured it."""

    seconds = 0.0

    def part_of_a_save(self, share: float) -> Callable[[int, float], None]:
        def wait(step: int, seconds: float) -> None:
            self.seconds = seconds or self.seconds
            time.sleep(share * self.seconds)

        return wait


def spread(count: int, generator: random.Random) -> list[float]:
    """One random place in each of `count` equal stretches of [0, SPAN), in random order."""
    places = [(number + generator.random()) / count * SPAN for number in range(count)]
    generator.shuffle(places)
    return places


def moment_of(checkpoints: Checkpoints, step: int) -> str:
    """What a kill after the beginning of this step's save fell into."""
    finished = checkpoints.list_finished()
    if step not in [number_of(path) for path in finished]:
        return "writing"
    rotated = checkpoints.folder / f"step_{step - KEEP:06d}{UNFINISHED}"
    return "rotating" if len(finished) > KEEP or rotated.exists() else "saved"


def number_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step_"))


def check_newest(model: str, run: Path, step: int, expected: dict[int, Digests]) -> None:
    """It is whole, it is step `step` or the one before, plain Transformers opens it, and it goes on exactly.

    Older ones that still have their names are whole too.
    """
    checkpoints = checkpoints_of(run)
    newest = checkpoints.newest()
    if newest is None:
        assert step == 1, "the checkpoints are gone"
        return
    at = number_of(newest)
    assert at in (step - 1, step)
    for path in checkpoints.list_finished():
        assert checkpoints.read_state(path) == {"step": number_of(path)}
    opened = AutoModelForCausalLM.from_pretrained(newest / "model")
    weights = {f"{name}/weight": digest(tensor) for name, tensor in opened.named_parameters()}
    assert weights == {name: value for name, value in expected[at].items() if name.endswith("/weight")}
    course = Course(model, run)
    assert course.step == at
    assert course.digests() == expected[at]
    course.learn()
    assert course.digests() == expected[at + 1]


def uninterrupted(model: str, steps: int) -> dict[int, Digests]:
    """The state after each step of a run that nobody killed."""
    course, found = Course(model, Path("nowhere")), {}
    for _ in range(steps):
        course.learn()
        found[course.step] = course.digests()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[int, Digests]:
    return uninterrupted(model, KILLS[-1] * MOST_SAVES + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [KILLS[0], pytest.param(KILLS[1], marks=pytest.mark.soak)])
def test_kills_within_saves_cost_nothing_but_the_save(
    kills: int, model: str, expected: dict[int, Digests], tmp_path: Path
) -> None:
    generator = random.Random(0)
    clock, moments, leftovers = Wait(), Counter[str](), 0
    kill_within_a_save(model, tmp_path / "measured", clock.part_of_a_save(0), saves=4)
    for share in spread(kills, generator):
        saves = generator.randint(1, MOST_SAVES)
        step = kill_within_a_save(model, tmp_path, clock.part_of_a_save(share), saves)
        moments[moment_of(checkpoints_of(tmp_path), step)] += 1
        leftovers += checkpoints_of(tmp_path).folder.joinpath(f"step_{step:06d}{UNFINISHED}").exists()
        check_newest(model, tmp_path, step, expected)
    assert moments["writing"] >= kills // 3, moments
    assert leftovers >= max(kills // 4, 1), f"{leftovers} kills left an unfinished folder"
    check_that_it_ends_tidy(model, tmp_path, expected)


def check_that_it_ends_tidy(model: str, run: Path, expected: dict[int, Digests]) -> None:
    """One more save, undisturbed: as many checkpoints as are kept, the newest that of this step."""
    course = Course(model, run)
    course.learn()
    course.begin_to_save()
    course.checkpoints.settle(wait=True)
    assert [number_of(path) for path in checkpoints_of(run).list_finished()] == [course.step - 1, course.step]
    check_newest(model, run, course.step, expected)


@pytest.mark.slow
def test_a_kill_as_soon_as_a_checkpoint_has_its_name(model: str, expected: dict[int, Digests], tmp_path: Path) -> None:
    """Between the rename and the end of the rotation, where a delay hits too seldom."""
    folder = checkpoints_of(tmp_path).folder

    def wait(step: int, seconds: float) -> None:
        target = folder / f"step_{step:06d}"
        while not target.exists():
            time.sleep(1e-4)

    for _ in range(2):
        step = kill_within_a_save(model, tmp_path, wait, saves=MOST_SAVES)
        assert moment_of(checkpoints_of(tmp_path), step) != "writing"
        check_newest(model, tmp_path, step, expected)


STEPS, KILLED = 8, 10
COMMAND = [
    *(sys.executable, "-m", "trueline.cli", "sft", "--model", "model", "--data", "rows.jsonl", f"steps={STEPS}"),
    *("samples_per_step=4", "training.engine=deepspeed", "training.ranks=2", "training.learning_rate=1e-3"),
    *("evaluation.share=0.2", "evaluation.every=2", "checkpoint.every=1", f"checkpoint.keep={KEEP}"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model", tied=True)
    rows = [{"prompt": f"{one} + {one} =", "completion": str(one + one)} for one in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The folder of a run that nobody killed."""
    finish(home, "--name", "whole")
    return home / "runs" / "whole"


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return programs.start([*COMMAND, *words], home, environment, start_new_session=True)


def finish(home: Path, *words: str) -> str:
    process = start(home, *words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def kill_when(
    process: subprocess.Popen[str], folder: Path, come: Callable[[set[str]], bool], later: float = 0.0
) -> set[str]:
    """Kills all processes of a run, as a power cut does, once its checkpoint folder has what `come` waits for."""
    wait_for(process, folder, lambda names: newest_in(names) > 0)
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    seen = wait_for(process, folder, come)
    time.sleep(later)
    os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        if member.is_running():
            member.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive
    return seen


def wait_for(process: subprocess.Popen[str], folder: Path, come: Callable[[set[str]], bool]) -> set[str]:
    names: set[str] = set()
    while not come(names):
        assert process.poll() is None, "the run ended"
        time.sleep(5e-4)
        names = set(os.listdir(folder)) if folder.is_dir() else set()
    return names


def is_being_written(names: set[str]) -> bool:
    """A folder of step 2 or later without its name, and newer than all that have theirs."""
    newest = newest_in(names)
    unfinished = [number_of(Path(name)) for name in names if name.endswith(UNFINISHED)]
    return any(number >= 2 and number > newest for number in unfinished)


def is_just_saved(names: set[str]) -> bool:
    return "step_000004" in names


MOMENTS = {"while a checkpoint is written": is_being_written, "as soon as a checkpoint is whole": is_just_saved}


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_end(home: Path, whole: Path, moment: str) -> None:
    name = f"killed-{list(MOMENTS).index(moment)}"
    run = home / "runs" / name
    seen = kill_when(start(home, "--name", name), run / "checkpoints", MOMENTS[moment])
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    said = finish(home, "--name", name, "--resume")
    assert "resumed from" in said
    last = Path("checkpoints") / f"step_{STEPS:06d}"
    assert len(tensors_of(whole / last)) == 6  # weights, training state and random numbers of each rank
    assert tensors_of(run / last) == tensors_of(whole / last), f"seen {seen}, left {left}"
    assert course_of(run) == course_of(whole), f"seen {sorted(seen)}, left {left}"
    assert [row["step"] for row in course_of(run)] == list(range(STEPS + 1))


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_a_run_that_is_killed_ten_times_ends_like_one_that_nobody_killed(home: Path, engine: str) -> None:
    """At random moments: some right after a resumed run's first checkpoint, some while it writes a later one."""
    generator, longer = random.Random(engine), [f"training.engine={engine}", f"steps={5 * KILLED}"]
    finish(home, *longer, "--name", f"whole-{engine}")
    name, run, kills = f"killed-{engine}", home / "runs" / f"killed-{engine}", 0
    while kills < KILLED:
        process = start(home, *longer, "--name", name, *["--resume"] * bool(kills))
        kill_when(process, run / "checkpoints", partial(is_beyond, newest_of(run)), generator.uniform(0, 0.5))
        kills += 1
    assert "resumed from" in finish(home, *longer, "--name", name, "--resume")
    last = Path("checkpoints") / f"step_{5 * KILLED:06d}"
    whole = home / "runs" / f"whole-{engine}"
    assert tensors_of(run / last) == tensors_of(whole / last)
    assert course_of(run) == course_of(whole)


def is_beyond(step: int, names: set[str]) -> bool:
    return newest_in(names) > step


def newest_of(run: Path) -> int:
    return newest_in(set(os.listdir(run / "checkpoints"))) if run.exists() else 0


def newest_in(names: set[str]) -> int:
    return max((number_of(Path(name)) for name in names if not name.endswith(UNFINISHED)), default=0)


def tensors_of(checkpoint: Path) -> dict[str, Digests]:
    files = {file.name: load_file(file) for file in checkpoint.rglob("*.safetensors")}
    return {name: {key: digest(tensor) for key, tensor in tensors.items()} for name, tensors in files.items()}


def course_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, without what the clock and the machine say."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    machine = ("time/", "speed/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(machine)} for row in rows]
