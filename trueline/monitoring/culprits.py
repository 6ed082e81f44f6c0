"""Name the likely culprit of a run without progress, in one sentence, by the first rule that finds one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trueline.monitoring.heartbeat import GONE, STOPPED, ActivityGroup, SeenProcess
from trueline.monitoring.timing import duration

SMALL_DISK = 64 * 2**20  # bytes; hardly enough for a checkpoint
SILENT_SECONDS = 30.0  # of a living process: something holds all its threads
SAVING = ("save", "save_result")  # methods of a rank


@dataclass(frozen=True, slots=True)
class Situation:
    driver: SeenProcess
    others: list[SeenProcess] = field(default_factory=list)
    folder: str = ""  # of the run
    free: int = SMALL_DISK  # bytes of its disk
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
    names = [one.beat.name for one in seen.others if one.state == GONE and not ending]
    return f"{names[0]}'s process is gone{and_others(names)}; see its log" if names else ""


def stopped_process(seen: Situation) -> str:
    everyone = [*seen.others, seen.driver]
    names = [one.beat.name for one in everyone if one.state == STOPPED]
    if names:
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
    """Describe what a process does, by its last heartbeat."""
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
    row = seen.oldest("call")
    if row is None:
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
    return next(filter(None, (rule(seen) for rule in CULPRITS)), "nothing is in flight; see the stacks")


def certain_culprit(seen: Situation) -> str:
    """Return a culprit that needs no silence to be one; any run waits for the others at times."""
    return dead_process(seen) or stopped_process(seen) or full_disk(seen)
