"""Explain a run without progress: once, on its screen and in a file, and on request."""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from trueline.config.base import ConfigError, read_tree
from trueline.config.run import RunConfig
from trueline.monitoring import heartbeat
from trueline.monitoring.culprits import SILENT_SECONDS, Situation, certain_culprit, find_culprit
from trueline.monitoring.heartbeat import BEAT, BEAT_SECONDS, RUN, WORK, Heartbeat
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import duration

SHARE_OF_TIMEOUT = 0.1  # of `timeout_seconds` without progress, after which a run reports
SHOWN_LINES = 12  # of a report on the screen
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


def find_situation(driver: Heartbeat, logs: Path) -> Situation:
    """Look at all processes of a run, given the heartbeat of its driver."""
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
    """Describe a run that makes progress, or has not been silent for long."""
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
        if certain_culprit(seen) or seen.silence() > longest_silence(folder):
            return describe_silence(seen)
        return describe_progress(seen, folder)
    try:
        folder.check_idle()
    except ConfigError as error:
        return f"The run is being planned and has not started. {error}"
    return describe_end(folder, driver)


def is_alive(driver: Heartbeat) -> bool:
    """Tell whether a driver lives; on another machine that shares the disk, by its last heartbeat."""
    elsewhere = driver.host != socket.gethostname() and time.time() - driver.written < SILENT_SECONDS
    return elsewhere or heartbeat.process_of(driver) is not None


def longest_silence(folder: RunFolder) -> float:
    """Return the seconds after which the run itself would report a silence."""
    seconds = RunConfig().timeout_seconds
    with suppress(ConfigError, KeyError):
        seconds = float(read_tree(folder.config)["timeout_seconds"])
    return seconds * SHARE_OF_TIMEOUT


def describe_end(folder: RunFolder, driver: Heartbeat | None) -> str:
    lines = folder.log.read_text(errors="replace").split("\n") if folder.log.is_file() else []
    error = folder.last_error()
    last = error.line() if error else next((line for line in reversed(lines) if line.strip()), "none")
    how, again = "has ended", ""
    if driver is not None:
        how = f"is not running: its process {driver.pid} on {driver.host} is gone"
        again = f"\nResume with: {folder.resume_command()}" if folder.config.is_file() else ""
    return f"The run {how}. {'Its error' if error else 'Last log line'}: {last}{again}"
