"""`trueline replay`: compute recorded steps again, and say where they differ from the log."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trueline.config.base import ConfigError, Tree
from trueline.config.rl import RLConfig
from trueline.replay.archive import pack, unpack
from trueline.replay.differences import FIRST, Replayed, compare
from trueline.replay.rewards import ask_again
from trueline.replay.steps import RecordedRun, spans
from trueline.report.runs import find_run
from trueline.verbs import VERBS

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    of: str
    steps: Sequence[int]  # the first and the last; empty: the last that can be replayed
    keys: Tree
    json: bool = False
    pack: Path | None = None
    base: bool = True  # in an archive: the model that the run began from
    rewards: bool = False
    trust_code: bool = False


def replay(request: ReplayRequest, say: Say) -> int:
    """Return 0 if every step is as in the log, 1 if one differs."""
    with open_run(request) as run:
        steps = choose_steps(run, request.steps)
        if request.pack is not None:
            pack(run, steps, request.pack, base=request.base, say=say)
            return 0
        if request.rewards:
            return show_rewards(run, steps)
        found = []
        for step in steps:
            found.append(compare(run, step))
            if not request.json:
                sys.stdout.write(table(found[-1], header=len(found) == 1) + "\n")
    wrong = [one for one in found if not one.agrees()]
    if request.json:
        sys.stdout.write(json.dumps([asdict(one) | {"agrees": one.agrees()} for one in found]) + "\n")
    else:
        sys.stdout.write(summary(found, wrong) + "\n")
    return int(bool(wrong))


@contextmanager
def open_run(request: ReplayRequest) -> Iterator[RecordedRun]:
    """Find a run, or open an archive for as long as it is replayed."""
    if Path(request.of).is_file():
        with TemporaryDirectory(prefix="trueline-replay-") as folder:
            found = unpack(Path(request.of), Path(folder).resolve(), trusts_code=request.trust_code)
            yield RecordedRun(found, request.keys, archive=True, trusted=request.trust_code)
        return
    found = find_run(request.of)
    verb = found.verb() if found.config.is_file() else ""
    if verb not in VERBS or not issubclass(VERBS[verb].kind, RLConfig):
        raise ConfigError(
            f"{found.path} is a run of {verb or 'no known verb'}: only reinforcement learning is replayed"
        )
    yield RecordedRun(found, request.keys)


def choose_steps(run: RecordedRun, asked: Sequence[int]) -> list[int]:
    if asked:
        steps = list(range(asked[0], asked[-1] + 1))
    else:
        can = [step for step in run.files.steps() if run.starts(step)]
        steps = can[-1:] or [max(run.log, default=1)]  # refused by name
    for step in steps:
        run.start(step)
    return steps


def show_rewards(run: RecordedRun, steps: list[int]) -> int:
    asked, lines = 0, list[str]()
    for step in steps:
        count, differing = ask_again(run, step)
        asked, lines = asked + count, lines + differing
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"{asked - len(lines)} of {asked} rewards of steps {spans(steps)} are as in the run\n")
    return int(bool(lines))


def table(one: Replayed, *, header: bool) -> str:
    """Put a step into rows: its main numbers in the log and here, and its token log-probs."""
    lines = [f"{'step':>6}  {'quantity':<20}  {'in the log':>14}  {'here':>14}  {'difference':>10}"] * header
    names = [name for name in one.here if name.removeprefix("critic/") in FIRST and name in one.logged]
    for name in [*names, *(name for name in one.different if name not in names)]:
        logged, here = one.logged[name], one.here[name]
        lines.append(f"{one.step:>6}  {name:<20}  {logged:>14.8g}  {here:>14.8g}  {abs(logged - here):>10.1e}")
    if one.tokens is not None:
        lines.append(f"{one.step:>6}  {'token log-probs':<20}  {'':>14}  {'':>14}  {one.tokens.largest:>10.1e}")
    return "\n".join(lines)


def summary(found: list[Replayed], wrong: list[Replayed]) -> str:
    lines = [f"{len(found) - len(wrong)} of {len(found)} steps are as in the log"]
    if wrong:
        lines.append(f"first difference: {wrong[0].first()}")
        lines += [f"likely: {cause}" for cause in wrong[0].causes if cause not in wrong[0].wrong[:1]]
    return "\n".join(lines)
