"""The whole examination: what a start would say or refuse, then every family of checks."""

import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor import data, machine, rewards, template, training
from trueline.doctor.case import Case, Check, case_of, gather
from trueline.doctor.findings import Finding, Findings, fill, line_of, named_key, refusal
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.monitoring.trackers import check_trackers
from trueline.offline import plan as offline
from trueline.offline.plan import SupervisedPlan
from trueline.rl.estimates import describe_plan
from trueline.rl.plan import RLPlan, plan_rl
from trueline.runs.preflight import Reading, chained

if TYPE_CHECKING:
    from trueline.runs.launch import Job

FAMILIES: dict[str, tuple[Check, ...]] = {
    "data": data.CHECKS,
    "chat template": template.CHECKS,
    "rewards": rewards.CHECKS,
    "training": training.CHECKS,
    "machine": machine.CHECKS,
}
MATERIAL: dict[str, str] = {  # what a family cannot do without: a part of the case
    "data": "rows",
    "chat template": "tokenizer",
    "rewards": "rows",
    "training": "model",
    "machine": "model",
}
SAID = ("bad", "watch")  # levels, at a start
FEW = 20  # letters that a plan may hold by chance
REMARKS = ("warning: ", "template   ")  # lines of a plan that ask for a look


@dataclass(frozen=True, slots=True)
class Planned:
    """A run as far as it was planned, and what is said of it; without a reading, the plan is refused."""

    config: RunConfig
    said: list[Finding]
    reading: Reading | None = None
    plan: RLPlan | SupervisedPlan | None = None  # of runs that train


def examine(config: RunConfig, verb: str, prepare: str, *, resume: bool = False, deep: bool = False) -> Findings:
    """Look at a run that is not started: plan it, then check all that could be read of it; `deep` has it try a step."""
    run = planned(config, verb, prepare, resume=resume)
    found = checked(run)
    if not deep:
        return found
    from trueline.doctor.deep import try_run  # noqa: PLC0415  (it brings all that trains)

    if run.plan is None or any(one.level == "refused" for findings in found.values() for one in findings):
        return found | {"deep": [Finding("watch", "nothing was tried: the run would not start")]}
    return found | {"deep": try_run(run.plan, verb)}


def checked(run: Planned) -> Findings:
    said, case = run.said, case_of(run.config, run.reading) if run.reading else gather(run.config)
    found = {family: list(looked_at(case, checks)) for family, checks in FAMILIES.items()}
    known = {one.key for findings in found.values() for one in findings} - {""}
    plan = [one for one in said if one.level == "refused" or one.key not in known]
    filled = {
        family: fill(new(findings, said), len(FAMILIES[family]), unread(case, family))
        for family, findings in found.items()
    }
    return {"plan": plan or [Finding("fine", "the run would start")], **filled}


def said_at_start(config: RunConfig, reading: Reading, about: str) -> list[str]:
    """Return a line for each finding that asks for a look and that the plan, which is `about` the run, has not said."""
    case = case_of(config, reading)
    found = [one for checks in FAMILIES.values() for one in looked_at(case, checks)]
    return [line_of(one) for one in found if one.level in SAID and not is_said(one, about)]


def is_said(one: Finding, about: str) -> bool:
    """Tell whether the plan has these words, or those of them that follow what they are about."""
    words = one.what.partition(": ")[2]
    return one.what in about or (len(words) > FEW and words in about)


def planned(config: RunConfig, verb: str, prepare: str, *, resume: bool) -> Planned:
    """Plan a run as its start does."""
    name = config.name or default_name(verb)
    folder = RunFolder(Path(config.folder).resolve() / name)
    try:
        config, _ = chained(config)
        plan, about = plan_of(config.replaced({"name": name}), verb, prepare, folder)
        if isinstance(config, RLConfig | SupervisedConfig):
            check_trackers(config.monitoring)
        if folder.path.exists() and not resume:
            raise ConfigError(f"name={name}: {folder.path} exists: add --resume, or choose another --name")
    except ConfigError as error:
        return Planned(config, [refusal(error, type(config))])
    said = list(remarks(about, type(config)))
    if isinstance(plan, RLPlan | SupervisedPlan):
        return Planned(plan.config, said, plan.reading(), plan)
    return Planned(plan.config, said, plan.reading)


def plan_of(
    config: RunConfig, verb: str, prepare: str, folder: RunFolder
) -> "tuple[RLPlan | SupervisedPlan | Job, str]":
    """Return a run's plan, and that in words; of runs that train, without importing what trains."""
    if isinstance(config, RLConfig):
        plan = plan_rl(config)
        return plan, describe_plan(plan)
    if isinstance(config, SupervisedConfig):
        given = offline.plan_supervised(config)
        return given, offline.describe_plan(given)
    from trueline.runs.launch import Start  # noqa: PLC0415  (seconds to import)

    job: Job = pkgutil.resolve_name(prepare)(config, Start(verb, folder, resume=False))
    return job, job.about


def remarks(about: str, kind: type[RunConfig]) -> Iterator[Finding]:
    for line in about.splitlines():
        for prefix in REMARKS:
            if line.startswith(prefix):
                said = line.removeprefix(prefix)
                yield Finding("watch", said, "", named_key(said, kind))


def looked_at(case: Case, checks: Iterable[Check]) -> Iterator[Finding]:
    for check in checks:
        try:
            yield from check(case)
        except ConfigError as error:
            yield refusal(error, type(case.config))
        except OSError as error:
            yield Finding("watch", f"something could not be looked at: {error}")


def unread(case: Case, family: str) -> str:
    """Say what a family would have needed and could not be read."""
    absent = {"rows": not case.rows, "tokenizer": case.chat is None, "model": case.facts is None}
    needed = MATERIAL[family]
    asked = family != "rewards" or case.rewards.named_parts()
    return f"the run's {needed} could not be read" if asked and absent[needed] else ""


def new(findings: list[Finding], said: list[Finding]) -> list[Finding]:
    """Leave out what the plan was refused with already."""
    return [one for one in findings if one.level != "refused" or one not in said]
