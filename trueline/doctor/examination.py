"""The whole examination: the findings or the refusal of a plan, then every family of checks."""

import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor import data, template, training
from trueline.doctor.case import Case, Check, case_of, gather
from trueline.doctor.table import Findings, refusal
from trueline.monitoring.findings import BAD, FINE, REFUSED, WATCH, Finding
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.monitoring.trackers import check_trackers
from trueline.plan.inputs import Reading, resolve_run_as_model
from trueline.plan.offline import SupervisedPlan, plan_supervised
from trueline.plan.rl import RLPlan, plan_rl

if TYPE_CHECKING:
    from trueline.runs.launch import Job

FAMILIES: dict[str, tuple[str, tuple[Check, ...]]] = {  # the part of the case that they need, and the checks
    "data": ("rows", data.CHECKS),
    "chat template": ("tokenizer", template.CHECKS),
    "rewards": ("rows", (data.check_trials,)),
    "training": ("model", training.CHECKS),
    "machine": ("model", training.MACHINE_CHECKS),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A run as far as it was planned, and its findings; without a reading, the plan is refused."""

    config: RunConfig
    findings: list[Finding]
    reading: Reading | None = None
    plan: RLPlan | SupervisedPlan | None = None  # of runs that train


def examine(config: RunConfig, verb: str, prepare: str, *, resume: bool = False, deep: bool = False) -> Findings:
    """Plan a run without starting it, and check all that could be read of it; `deep` tries one step."""
    run = try_plan(config, verb, prepare, resume=resume)
    found = run_checks(run)
    if not deep:
        return found
    from trueline.doctor.deep import try_run  # noqa: PLC0415  (it brings all that trains)

    if run.plan is None or any(one.level == REFUSED for findings in found.values() for one in findings):
        return found | {"deep": [Finding(WATCH, "not_tried", "no step was tried, because the run would not start")]}
    return found | {"deep": try_run(run.plan, verb)}


def run_checks(run: Planned) -> Findings:
    case = case_of(run.config, run.reading) if run.reading else gather(run.config)
    found = {family: list(apply_checks(case, checks)) for family, (_, checks) in FAMILIES.items()}
    known = {one.code for findings in found.values() for one in findings}
    plan = [one for one in run.findings if one.level == REFUSED or one.code not in known]
    absent = {"rows": not case.rows, "tokenizer": case.chat is None, "model": case.facts is None}
    filled: Findings = {"plan": plan or [Finding(FINE, "would_start", "the run would start")]}
    for family, findings in found.items():
        needed, checks = FAMILIES[family]
        new = [one for one in findings if one.level != REFUSED or one not in run.findings]
        if absent[needed] and (family != "rewards" or case.rewards.named_parts()):
            new.append(Finding(WATCH, "unread", f"some checks were skipped: the run's {needed} could not be read"))
        checked = f"{len(checks)} check{'s' * (len(checks) > 1)}"
        filled[family] = new or [Finding(FINE, "nothing_found", f"{checked} found nothing")]
    return filled


def findings_at_start(config: RunConfig, reading: Reading, known: Iterable[Finding]) -> list[Finding]:
    """Return the findings that need attention, except those that the plan has reported."""
    case, codes = case_of(config, reading), {one.code for one in known}
    found = [one for _, checks in FAMILIES.values() for one in apply_checks(case, checks)]
    return [one for one in found if one.level in (BAD, WATCH) and one.code not in codes]


def try_plan(config: RunConfig, verb: str, prepare: str, *, resume: bool) -> Planned:
    name = config.name or default_name(verb)
    folder = RunFolder(Path(config.folder).resolve() / name)
    try:
        config, _ = resolve_run_as_model(config)
        plan = plan_of(config.with_keys({"name": name}), verb, prepare, folder)
        if isinstance(config, RLConfig | SupervisedConfig):
            check_trackers(config.monitoring)
        if folder.path.exists() and not resume:
            raise ConfigError(f"name={name}: {folder.path} exists: add --resume, or choose another --name", key="name")
    except ConfigError as error:
        return Planned(config, [refusal(error)])
    if isinstance(plan, RLPlan | SupervisedPlan):
        return Planned(plan.config, plan.findings, plan.reading(), plan)
    return Planned(plan.config, list(plan.findings), plan.reading)


def plan_of(config: RunConfig, verb: str, prepare: str, folder: RunFolder) -> "RLPlan | SupervisedPlan | Job":
    """Return a run's plan; of runs that train, without importing what trains."""
    if isinstance(config, RLConfig):
        return plan_rl(config)
    if isinstance(config, SupervisedConfig):
        return plan_supervised(config)
    from trueline.runs.launch import Start  # noqa: PLC0415  (seconds to import)

    job: Job = pkgutil.resolve_name(prepare)(config, Start(verb, folder, resume=False))
    return job


def apply_checks(case: Case, checks: Iterable[Check]) -> Iterator[Finding]:
    for check in checks:
        try:
            yield from check(case)
        except ConfigError as error:
            yield refusal(error)
        except OSError as error:
            yield Finding(WATCH, "unread", f"a check could not read a file: {error}")
