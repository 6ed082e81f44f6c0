"""Explain a run without progress, by its likely culprit: once, on its screen and in a file, and on request."""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from trueline.config.base import ConfigError, read_tree
from trueline.config.run import RunConfig
from trueline.monitoring import heartbeat
from trueline.monitoring.heartbeat import BEAT, BEAT_SECONDS, RUN, WORK, ActivityGroup, Heartbeat, SeenProcess
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import duration

SHARE_OF_TIMEOUT = 0.1  # of `timeout_seconds` without progress, after which a run reports
SHOWN_LINES = 12  # of a report on the screen
SMALL_DISK = 64 * 2**20  # bytes; hardly enough for a checkpoint
SILENT_SECONDS = 30.0  # of a living process: something holds all its threads
SAVING = ("save", "save_result")  # methods of a rank
PHASES = {  # what a run does in each
    "plan": "reads the data and plans",
    "start": "loads models and engines, which may compile",
    "rollout": "samples completions and waits for their rewards",
    "score": "computes log-probs",
    "train": "updates the model",
    "sync": "sends the weights to the engines",
    "evaluate": "evaluates",
    "save": "saves a checkpoint",
    "end": "ends its processes",
}


@dataclass(frozen=True, slots=True)
class Situation:
    driver: SeenProcess
    others: list[SeenProcess]
    folder: str  # of the run
    free: int  # bytes of its disk
    now: float = field(default_factory=time.time)

    def age(self, row: ActivityGroup) -> str:
        return duration(self.now - row.since)

    def oldest(self, *kinds: str) -> ActivityGroup | None:
        """Return what the driver has waited for longest, of these kinds, and not because of something else."""
        rows = [row for row in self.driver.beat.rows if row.kind in kinds and not row.waits]
        return min(rows, key=lambda row: row.since, default=None)

    def phase(self) -> ActivityGroup | None:
        """Return the innermost phase of the driver."""
        phases = [row for row in self.driver.beat.rows if row.kind == "phase"]
        return max(phases, key=lambda row: row.since, default=None)

    def silence(self) -> float:
        """Return the seconds without progress in any process."""
        return max(self.now - max(one.beat.moved for one in [self.driver, *self.others]), 0.0)


def dead_process(seen: Situation) -> str:
    ending = (phase := seen.phase()) is not None and phase.who == "end"  # when they should go
    names = [one.beat.name for one in seen.others if one.state == heartbeat.GONE and not ending]
    return f"{names[0]}'s process is gone{and_others(names)}; see its log" if names else ""


def stopped_process(seen: Situation) -> str:
    everyone = [*seen.others, seen.driver]
    if names := [one.beat.name for one in everyone if one.state == heartbeat.STOPPED]:
        return f"{names[0]} is stopped (state T){and_others(names)}; SIGCONT resumes it"
    children = [f"a child process of {one.beat.name} ({child})" for one in everyone for child in one.stopped_children]
    return f"{children[0]} is stopped (state T){and_others(children)}" if children else ""


def and_others(names: list[str]) -> str:
    return f", so are {', '.join(names[1:])}" if names[1:] else ""


def full_disk(seen: Situation) -> str:
    return f"the disk of {seen.folder} is full; {slow_checkpoint(seen)}".rstrip("; ") if seen.free < SMALL_DISK else ""


def slow_data(seen: Situation) -> str:
    row = seen.oldest("data")
    return f"the data is being read since {seen.age(row)}: {row.who}={row.what}" if row else ""


def slow_user_code(seen: Situation) -> str:
    """Blame a reward or an environment, if the run waits for nothing else longer."""
    row = seen.oldest("reward", "environment", "call")
    if row is None or row.kind == "call":
        return ""
    if row.kind == "reward":
        return f"reward `{row.who}` has not answered for {seen.age(row)}: {count_waiting(row, 'call')} on {row.what}"
    waiting = count_waiting(row, "episode")
    return f"environment {row.who} has not returned from `{row.what}` for {seen.age(row)}: {waiting}"


def count_waiting(row: ActivityGroup, noun: str) -> str:
    return f"{row.count} {noun}s wait" if row.count > 1 else f"1 {noun} waits"


def split_collective(seen: Situation) -> str:
    """Blame ranks that are elsewhere while others wait for them in a collective."""
    for members in collective_groups(seen):
        waiting = [one for one in members if one.collective()]
        others = [one for one in members if not one.collective()]
        where = sorted({one.collective() for one in waiting})
        if waiting and others:
            blamed = ", ".join(f"{process_names([one])} {describe_activity(one, seen)}" for one in others)
            wait = "wait" if len(waiting) > 1 else "waits"
            return f"{blamed}, while {process_names(waiting)} {wait} in a collective ({', '.join(where)})"
        if len(where) > 1:
            each = ", ".join(f"{process_names([one])} in {one.collective()}" for one in waiting)
            return f"ranks wait in different collectives: {each}"
        if len(waiting) > 1:
            names = process_names(waiting)
            return f"{names} all wait for each other in {where[0]}: the network between them, or a device"
    return ""


def collective_groups(seen: Situation) -> list[list[SeenProcess]]:
    """Return the members of collectives: the ranks of each model; during a sync, all processes with a call."""
    if (phase := seen.phase()) is not None and phase.who == "sync":
        called = {row.who for row in seen.driver.beat.rows if row.kind == "call"}
        return [[one for one in seen.others if one.beat.name in called]]
    roles: dict[str, list[SeenProcess]] = {}
    for one in seen.others:
        role, _, number = one.beat.name.rpartition("-")
        roles.setdefault(role, []).extend([one] if number.isdigit() else [])
    return list(roles.values())


def process_names(some: list[SeenProcess]) -> str:
    """Name processes; of one model, by the numbers of their ranks."""
    places = [one.beat.name.rpartition("-") for one in some]
    if len({role for role, _, _ in places}) > 1:
        return ", ".join(one.beat.name for one in some)
    numbers = sorted(int(number) for _, _, number in places)
    adjoining = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    listed = f"{numbers[0]}-{numbers[-1]}" if adjoining else ", ".join(map(str, numbers))
    return f"{places[0][0]} rank{'s' * (len(numbers) > 1)} {listed}"


def describe_activity(one: SeenProcess, seen: Situation) -> str:
    part = next((f"the {row.who}" for row in reversed(one.beat.rows) if row.kind == "part"), "")
    call = next((f"`{row.what}` since {seen.age(row)}" for row in one.beat.rows if row.kind == "call"), "")
    silence = seen.now - one.beat.written
    last = f" (last heartbeat {duration(silence)} ago)" if silence > SILENT_SECONDS else ""
    return (f"is in {' of '.join(filter(None, (part, call)))}" if call else "has no call to work on") + last


def slow_checkpoint(seen: Situation) -> str:
    saving = [row for row in seen.driver.beat.rows if row.what in SAVING or (row.kind, row.who) == ("phase", "save")]
    by = "".join(f" by {row.who}" for row in saving[-1:] if row.kind == "call")
    room = f"{seen.folder} ({seen.free / 2**30:.0f} GiB free)"
    return f"a checkpoint is being written{by} since {seen.age(saving[0])}, to {room}" if saving else ""


def slow_call(seen: Situation) -> str:
    if (row := seen.oldest("call")) is None:
        return ""
    does = "".join(f"; it {describe_activity(one, seen)}" for one in seen.others if one.beat.name == row.who)
    return f"{row.who} has not answered for {seen.age(row)}: {count_waiting(row, 'call')} for `{row.what}`{does}"


def current_phase(seen: Situation) -> str:
    phase = seen.phase()
    return f"the run itself is in `{phase.who}` since {seen.age(phase)}" if phase else ""


CULPRITS: tuple[Callable[[Situation], str], ...] = (
    *(dead_process, stopped_process, slow_data, full_disk, slow_user_code),
    *(split_collective, slow_checkpoint, slow_call, current_phase),
)


def find_culprit(seen: Situation) -> str:
    """Name the likely culprit in one sentence, by the first rule that finds one."""
    return next(filter(None, (rule(seen) for rule in CULPRITS)), "nothing is in flight; see the stacks")


def find_situation(driver: Heartbeat, logs: Path) -> Situation:
    others = [heartbeat.look_at_process(beat, logs) for beat in heartbeat.other_beats(logs, RUN)]
    free = shutil.disk_usage(logs.parent).free
    return Situation(heartbeat.look_at_process(driver, logs), others, str(logs.parent), free)


def describe_situation(seen: Situation, *head: str) -> str:
    """Return the report: its head, what is in flight, the processes, and their stacks."""
    everyone = [seen.driver, *seen.others]
    rows = [row for row in seen.driver.beat.rows if row.kind != "phase"]
    under_way = [f"  {row.kind:<12}{row.who} {row.what}: {row.count}, since {seen.age(row)}" for row in rows]
    lines = [*head, "in flight, oldest first:", *(under_way or ["  nothing"]), "processes:"]
    for one in everyone:
        doing = [f"{row.who} {row.what}".strip() for row in one.beat.rows if row.kind in ("phase", "call", "part")]
        process = f"  {one.beat.name:<12}pid {one.beat.pid}, {one.state}: {', '.join(doing) or 'idle'}"
        lines.append(f"{process} (heartbeat {duration(seen.now - one.beat.written)} ago)")
    stacks = [f"\n== stacks of {one.beat.name} (pid {one.beat.pid}) ==\n{one.stack or 'none'}" for one in everyone]
    return "\n".join(lines + stacks)


def describe_silence(seen: Situation) -> str:
    phase = f" in `{phase.who}`" if (phase := seen.phase()) else ""
    silence = f"No progress for {duration(seen.silence())}{phase}"
    return describe_situation(seen, find_culprit(seen), f"{silence}; no process is ended before its own deadline.")


def describe_progress(seen: Situation, folder: RunFolder) -> str:
    step, doing = "", "between phases"
    with suppress(OSError, ValueError, KeyError, IndexError, ConfigError):  # not all runs count steps
        total = read_tree(folder.config)["steps"]
        done = folder.rows()[-1]["step"] if folder.metrics.exists() else 0
        step = f"step {min(done + 1, total or done + 1)}{f' of {total}' if total else ''}, "
    if phase := seen.phase():
        doing = f"it {PHASES.get(phase.who, 'works')} (`{phase.who}`) since {seen.age(phase)}"
    head = f"The run makes progress: {step}{doing}. Last progress {duration(seen.silence())} ago."
    return describe_situation(seen, head)


class Watch:
    """While it is open, a thread writes the driver's heartbeat, and reports a silence that is too long."""

    open_now: list["Watch"] = []  # only the last one reports, because stages of a run are runs too

    def __init__(self, timeout_seconds: float, say: Callable[[str], object]) -> None:
        self.silence, self.say = timeout_seconds * SHARE_OF_TIMEOUT, say
        self.aside = self.logs = Path(tempfile.mkdtemp(prefix="trueline-"))  # until the run has a folder
        self.reported = 0.0  # the last progress before the last report
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self.open_now.append(self)
        self.thread.start()
        return self

    def move(self, logs: Path, say: Callable[[str], object]) -> None:
        """Write heartbeats and reports to the run's folder from now on."""
        heartbeat.clear_beats(logs)
        self.logs, self.say = logs, say
        self._leave_aside()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(BEAT_SECONDS)
        self.open_now.remove(self)
        heartbeat.clear_beats(self.logs)
        self._leave_aside()

    def _leave_aside(self) -> None:
        heartbeat.clear_beats(self.aside)
        with suppress(OSError):
            self.aside.rmdir()  # unless a report is in it

    def _watch(self) -> None:
        while not self.ended.wait(min(BEAT_SECONDS, self.silence / 4)):
            self.check(time.time())

    def check(self, now: float) -> None:
        """Write the driver's heartbeat; report, once, if there was no progress for too long."""
        driver = WORK.beat(RUN)
        heartbeat.write_beat(self.logs, driver)
        if now - driver.moved < self.silence or self.open_now[-1] is not self:
            return
        moved = max(beat.moved for beat in [driver, *heartbeat.other_beats(self.logs, RUN)])
        if now - moved > self.silence and moved > self.reported:
            self.reported = moved
            with suppress(OSError):  # for example a disk that is gone: the run itself will report it
                self._report(describe_silence(find_situation(driver, self.logs)))

    def _report(self, text: str) -> None:
        file = self.logs / f"stuck-{len(list(self.logs.glob('stuck-*.txt'))) + 1}.txt"
        with suppress(OSError):
            file.write_text(text + "\n")
        shown = text.partition("\n\n")[0].splitlines()[:SHOWN_LINES]
        self.say("\n".join([f"stuck: {shown[0]}", *shown[1:], f"full report with stacks: {file}"]))


def explain(run: Path) -> str:
    """Explain a run from outside: what it does, what delays it, or how it ended."""
    folder = RunFolder(run)
    if not folder.logs.is_dir():
        raise ConfigError(f"{run} has no logs: name a run that was started")
    driver = heartbeat.read_beat(folder.logs / f"{RUN}{BEAT}")
    if driver is not None and is_alive(driver):
        seen = find_situation(driver, folder.logs)
        longest = RunConfig().timeout_seconds
        with suppress(ConfigError, KeyError):
            longest = float(read_tree(folder.config)["timeout_seconds"])
        certain = dead_process(seen) or stopped_process(seen) or full_disk(seen)  # without any silence
        if certain or seen.silence() > longest * SHARE_OF_TIMEOUT:
            return describe_silence(seen)
        return describe_progress(seen, folder)
    try:
        folder.check_idle()
    except ConfigError as refusal:
        return f"The run is being planned and has not started. {refusal}"
    lines = folder.log.read_text(errors="replace").split("\n") if folder.log.is_file() else []
    error = folder.last_error()
    last = error.line() if error else next((line for line in reversed(lines) if line.strip()), "none")
    how, again = "has ended", ""
    if driver is not None:
        how = f"is not running: its process {driver.pid} on {driver.host} is gone"
        again = f"\nResume with: {folder.resume_command()}" if folder.config.is_file() else ""
    return f"The run {how}. {'Its error' if error else 'Last log line'}: {last}{again}"


def is_alive(driver: Heartbeat) -> bool:
    """Tell whether a driver lives; on another machine that shares the disk, by its last heartbeat."""
    elsewhere = driver.host != socket.gethostname() and time.time() - driver.written < SILENT_SECONDS
    return elsewhere or heartbeat.process_of(driver) is not None
