"""The likely culprit of a run that does not move, in one sentence: the first rule that finds one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trueline.monitoring.beats import Row
from trueline.monitoring.stacks import GONE, STOPPED, Seen
from trueline.monitoring.timing import duration

SMALL_DISK = 64 * 2**20  # bytes; hardly a checkpoint fits in
SILENT_SECONDS = 30.0  # of a process that lives: something holds all of its threads
SAVING = ("save", "saved")  # methods


@dataclass(frozen=True, slots=True)
class Situation:
    driver: Seen
    others: list[Seen] = field(default_factory=list)
    folder: str = ""  # of the run
    free: int = SMALL_DISK  # bytes of its disk
    now: float = field(default_factory=time.time)

    def age(self, row: Row) -> str:
        return duration(self.now - row.since)

    def oldest(self, *kinds: str) -> Row | None:
        """Return what the driver has waited for the longest, of these kinds, and not because of something else."""
        rows = [row for row in self.driver.beat.rows if row.kind in kinds and not row.waits]
        return min(rows, key=lambda row: row.since, default=None)

    def phase(self) -> Row | None:
        """Return the innermost phase of the driver."""
        phases = [row for row in self.driver.beat.rows if row.kind == "phase"]
        return max(phases, key=lambda row: row.since, default=None)

    def silence(self) -> float:
        """Return the seconds for which nothing has moved in any process."""
        return max(self.now - max(one.beat.moved for one in [self.driver, *self.others]), 0.0)

    def calls(self) -> list[Row]:
        return [row for row in self.driver.beat.rows if row.kind == "call"]


def dead(seen: Situation) -> str:
    ending = (phase := seen.phase()) is not None and phase.who == "end"  # when they shall go
    names = [one.beat.name for one in seen.others if one.state == GONE and not ending]
    return f"{names[0]}'s process is gone{beside(names)}; its log tells why" if names else ""


def stopped(seen: Situation) -> str:
    everyone = [*seen.others, seen.driver]
    names = [one.beat.name for one in everyone if one.state == STOPPED]
    if names:
        return f"{names[0]} is stopped (state T){beside(names)}; a SIGCONT lets it go on"
    children = [f"a child process of {one.beat.name} ({child})" for one in everyone for child in one.stopped_children]
    return f"{children[0]} is stopped (state T){beside(children)}" if children else ""


def beside(names: list[str]) -> str:
    return f", so are {', '.join(names[1:])}" if names[1:] else ""


def full_disk(seen: Situation) -> str:
    return f"the disk of {seen.folder} is full; {writing(seen)}".rstrip("; ") if seen.free < SMALL_DISK else ""


def reading(seen: Situation) -> str:
    row = seen.oldest("data")
    return f"the data is being read since {seen.age(row)}: {row.who}={row.what}" if row else ""


def asked(seen: Situation) -> str:
    """Blame a reward or an environment, if nothing else is waited for longer."""
    row = seen.oldest("reward", "environment", "call")
    if row is None or row.kind == "call":
        return ""
    if row.kind == "environment":
        return f"environment {row.who} has not returned from `{row.what}` for {seen.age(row)}: {times(row, 'episode')}"
    return f"reward `{row.who}` has not answered for {seen.age(row)}: {times(row, 'call')} on {row.what}"


def times(row: Row, noun: str) -> str:
    return f"{row.count} {noun}s wait" if row.count > 1 else f"1 {noun} waits"


def apart(seen: Situation) -> str:
    """Blame processes that are elsewhere while others wait for them in a collective."""
    for members in meetings(seen):
        waiting = [one for one in members if one.collective()]
        others = [one for one in members if not one.collective()]
        where = sorted({one.collective() for one in waiting})
        if waiting and others:
            blamed = ", ".join(f"{named([one])} {doing(one, seen)}" for one in others)
            wait = "wait" if len(waiting) > 1 else "waits"
            return f"{blamed}, while {named(waiting)} {wait} in a collective ({', '.join(where)})"
        if len(where) > 1:
            each = ", ".join(f"{named([one])} in {one.collective()}" for one in waiting)
            return f"ranks wait in different collectives: {each}"
        if len(waiting) > 1:
            return f"{named(waiting)} all wait for each other in {where[0]}: the network between them, or a device"
    return ""


def meetings(seen: Situation) -> list[list[Seen]]:
    """Return who meets in collectives: the ranks of each model; while weights travel, all who are asked to."""
    if (phase := seen.phase()) is not None and phase.who == "sync":
        asked_now = {row.who for row in seen.calls()}
        return [[one for one in seen.others if one.beat.name in asked_now]]
    roles: dict[str, list[Seen]] = {}
    for one in seen.others:
        role, _, number = one.beat.name.rpartition("-")
        roles.setdefault(role, []).extend([one] if number.isdigit() else [])
    return list(roles.values())


def named(some: list[Seen]) -> str:
    """Name processes; of one model, by the numbers of their ranks."""
    places = [one.beat.name.rpartition("-") for one in some]
    if len({role for role, _, _ in places}) > 1:
        return ", ".join(one.beat.name for one in some)
    numbers = sorted(int(number) for _, _, number in places)
    adjoining = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    listed = f"{numbers[0]}-{numbers[-1]}" if adjoining else ", ".join(map(str, numbers))
    return f"{places[0][0]} rank{'s' * (len(numbers) > 1)} {listed}"


def doing(one: Seen, seen: Situation) -> str:
    """Say what a process does, by its own word."""
    part = next((f"the {row.who}" for row in reversed(one.beat.rows) if row.kind == "part"), "")
    call = next((f"`{row.what}` since {seen.age(row)}" for row in one.beat.rows if row.kind == "call"), "")
    silence = seen.now - one.beat.written
    last = f" (its last word, {duration(silence)} ago)" if silence > SILENT_SECONDS else ""
    return (f"is in {' of '.join(filter(None, (part, call)))}" if call else "has no call to work on") + last


def writing(seen: Situation) -> str:
    saving = [row for row in seen.driver.beat.rows if row.what in SAVING or (row.kind, row.who) == ("phase", "save")]
    by = "".join(f" by {row.who}" for row in saving[-1:] if row.kind == "call")
    room = f"{seen.folder} ({seen.free / 2**30:.0f} GiB free)"
    return f"a checkpoint is being written{by} since {seen.age(saving[0])}, to {room}" if saving else ""


def called(seen: Situation) -> str:
    row = seen.oldest("call")
    if row is None:
        return ""
    does = "".join(f"; it {doing(one, seen)}" for one in seen.others if one.beat.name == row.who)
    return f"{row.who} has not answered for {seen.age(row)}: {times(row, 'call')} for `{row.what}`{does}"


def within(seen: Situation) -> str:
    phase = seen.phase()
    return f"the run itself is in `{phase.who}` since {seen.age(phase)}" if phase else ""


CULPRITS: tuple[Callable[[Situation], str], ...] = (
    dead,
    stopped,
    reading,
    full_disk,
    asked,
    apart,
    writing,
    called,
    within,
)


def culprit(seen: Situation) -> str:
    return next(filter(None, (rule(seen) for rule in CULPRITS)), "nothing is under way; see the stacks")


def certain(seen: Situation) -> str:
    """Return a culprit that is one at once; all others are what any run waits for, and only so after a silence."""
    return dead(seen) or stopped(seen) or full_disk(seen)
