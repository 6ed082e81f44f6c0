"""The whole examination: what a start would say or refuse, then every family of checks."""

import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor import data, machine, rewards, template, training
from trueline.doctor.case import Case, Check, gather
from trueline.doctor.findings import Finding, Findings, fill, named_key, refusal
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.monitoring.trackers import check_trackers
from trueline.offline import plan as offline
from trueline.rl.estimates import describe_plan
from trueline.rl.plan import plan_rl
from trueline.runs.preflight import chained

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
REMARKS = ("warning: ", "template   ")  # lines of a plan that ask for a look


def examine(config: RunConfig, verb: str, prepare: str, *, resume: bool = False) -> Findings:
    """Look at a run that is not started: plan it, then check all that could be read of it."""
    config, said = planned(config, verb, prepare, resume=resume)
    case = gather(config)
    found = {family: list(looked_at(case, checks)) for family, checks in FAMILIES.items()}
    known = {one.key for findings in found.values() for one in findings} - {""}
    plan = [one for one in said if one.level == "refused" or one.key not in known]
    filled = {
        family: fill(new(findings, said), len(FAMILIES[family]), unread(case, family))
        for family, findings in found.items()
    }
    return {"plan": plan or [Finding("fine", "the run would start")], **filled}


def planned(config: RunConfig, verb: str, prepare: str, *, resume: bool) -> tuple[RunConfig, list[Finding]]:
    """Plan a run as its start does; return its keys, as far as they were filled in, and what is said of it."""
    name = config.name or default_name(verb)
    folder = RunFolder(Path(config.folder).resolve() / name)
    try:
        config, _ = chained(config)
        resolved, about = plan_of(config.replaced({"name": name}), verb, prepare, folder)
        if isinstance(config, RLConfig | SupervisedConfig):
            check_trackers(config.monitoring)
        if folder.path.exists() and not resume:
            raise ConfigError(f"name={name}: {folder.path} exists: add --resume, or choose another --name")
    except ConfigError as error:
        return config, [refusal(error, type(config))]
    return resolved, list(remarks(about, type(config)))


def plan_of(config: RunConfig, verb: str, prepare: str, folder: RunFolder) -> tuple[RunConfig, str]:
    """Return a run's keys and its plan in words; of runs that train, without importing what trains."""
    if isinstance(config, RLConfig):
        plan = plan_rl(config)
        return plan.config, describe_plan(plan)
    if isinstance(config, SupervisedConfig):
        given = offline.plan_supervised(config)
        return given.config, offline.describe_plan(given)
    from trueline.runs.launch import Start  # noqa: PLC0415  (seconds to import)

    job = pkgutil.resolve_name(prepare)(config, Start(verb, folder, resume=False))
    return job.config, job.about


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


def unread(case: Case, family: str) -> str:
    """Say what a family would have needed and could not be read."""
    absent = {"rows": not case.rows, "tokenizer": case.chat is None, "model": case.facts is None}
    needed = MATERIAL[family]
    asked = family != "rewards" or case.rewards.named_parts()
    return f"the run's {needed} could not be read" if asked and absent[needed] else ""


def new(findings: list[Finding], said: list[Finding]) -> list[Finding]:
    """Leave out what the plan was refused with already."""
    return [one for one in findings if one.level != "refused" or one not in said]
