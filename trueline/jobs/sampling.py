"""Jobs that sample and score but train nothing: `generate` and `eval`."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from rich.table import Column, Table

from trueline.config.base import ConfigError, read_tree
from trueline.config.rl import SamplingControls
from trueline.config.sampling import EvalConfig, GenerateConfig, SamplingConfig
from trueline.files import Row
from trueline.jobs.sample_file import (
    ASKED,
    SampleFile,
    keep_pictures,
    line_of,
    prompt_row,
    row_of,
    write_aside,
    write_json,
    write_selection,
)
from trueline.monitoring.findings import WATCH
from trueline.monitoring.health import limits_in, truncation_findings
from trueline.monitoring.limits import CUT_OFF
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.user_files import found_again
from trueline.plan.describe import describe
from trueline.plan.inputs import most_pictures
from trueline.plan.sampling import Kind, SamplingPlan, chosen_prompts, plan_eval, plan_generate
from trueline.rollout.engine import RolloutEngine
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.evaluation import Evaluator, environment_names, prefix_of
from trueline.rollout.failures import FailureBudget
from trueline.rollout.groups import Group, Numbered, sample_each
from trueline.rollout.pool import EnginePool
from trueline.runs.interrupts import Interrupts
from trueline.runs.launch import Job, Start, movable
from trueline.runs.processes import (
    Sampling,
    engine_specs,
    failure_files,
    open_loop,
    open_processes,
    open_sampling,
    role_group,
)
from trueline.training.group import start_groups

SAMPLES, SUMMARY, EVALUATION = "samples.jsonl", "summary.json", "evaluation.json"
REPORT_SECONDS = 5.0
ALWAYS_THE_SAME = (  # keys that the lines of one samples.jsonl share, whoever resumes the run
    *("seed", "samples", "model.path", "data.", "shard"),
    *(f"rollout.{key}" for key in (*SamplingControls.model_fields, "max_new_tokens", "max_prompt_tokens")),
    *(f"reward.{key}" for key in ("function", "parts", "pattern", "options", "weight", "clip", "normalize")),
    *(f"reward.{key}" for key in ("policy_error", "chat_template", "step", "judge")),
    *(f"environment.{key}" for key in ("function", "agent", "tool", "options", "max_turn", "truncated")),
)


@contextmanager
def open_job(plan: SamplingPlan[Kind], folder: RunFolder, progress: Progress) -> Iterator[Sampling]:
    """Start engines, reward models and rewards, yield what samples with them, and end them."""
    config, rollout, played = plan.config, plan.rollout, plan.config.environment.plays()
    models = [config.model.path, *(role.model.path for role in plan.reward_roles)]
    with ExitStack() as stack:
        processes = stack.enter_context(open_processes(plan.machine, plan.layout, folder.logs, config.runtime, models))
        loop = stack.enter_context(open_loop(config.timeout_seconds))
        progress.note("starting   engines and rewards; each process imports its libraries first")
        shown = most_pictures([one.prompts for one in plan.sets.values()], plan.chat, config.environment)
        specified = engine_specs(config.model, rollout, plan.layout, config.seed, structured=played)
        specs = [replace(spec, pictures=shown) for spec in specified]
        engines = processes.engines(ROLLOUT_ENGINES[rollout.engine].target(rollout), specs)
        pool, roles = EnginePool(engines, rollout.max_sequences, takes_groups=True), plan.reward_roles
        judges = {role.name: role_group(role, processes, config.seed, config.timeout_seconds) for role in roles}

        def wait() -> None:
            if judges:
                start_groups(list(judges.values()))
            loop.run(pool.call(RolloutEngine.processes), "starting the engines")  # so that only sampling is timed

        # Without any reward the sum is 0, which is not written down.
        yield stack.enter_context(open_sampling(plan, pool, processes, judges, loop, progress.note, wait))


def job_of(plan: SamplingPlan[Kind], run: Callable[[SamplingPlan[Kind], RunFolder, Progress], int]) -> Job:
    work, reading = partial(run, plan), plan.reading()
    return Job(plan.config, describe(plan), plan.total, work, reading=reading, findings=plan.findings)


def prepare_generate(config: GenerateConfig, start: Start) -> Job:
    plan = plan_generate(config)
    if start.resume:
        check_unchanged(plan.config, start.folder)
    return job_of(plan, generate)


def check_unchanged(config: GenerateConfig, folder: RunFolder) -> None:
    """Refuse to resume a run whose file would mix completions of two models, temperatures, datasets or rewards."""
    saved = found_again(read_tree(folder.config), folder.path.parent)
    before = {key.path: key.default for key in movable(GenerateConfig.parse(saved)).leaves()}
    for key in movable(config).leaves():
        if key.path.startswith(ALWAYS_THE_SAME) and before[key.path] != key.default:
            change = f"{key.path} was {before[key.path]} when this run began and is {key.default} now"
            why = "its completions would be of two kinds; choose another --name"
            raise ConfigError(f"{change}: {why}", key=key.path)


def generate(plan: SamplingPlan[GenerateConfig], folder: RunFolder, progress: Progress) -> int:
    """Sample whatever is not yet in samples.jsonl, select from everything in it, and return the exit status."""
    prompts = chosen_prompts(plan)
    with SampleFile(folder.path / SAMPLES) as file:
        left = [numbered for numbered in prompts if numbered[0] not in file.places]
        check_sampled(file, [numbered for numbered in prompts if numbered[0] in file.places])
        if len(left) < len(prompts):
            progress.note(f"resumed    {len(prompts) - len(left)} of {len(prompts)} prompts are sampled")
        pace = Pace(progress, len(prompts) - len(left), budget_for(plan.config, folder), plan.config.has_reward())
        if left and not sample(plan, left, file, folder, pace):
            stopped = f"stopped: {pace.done} of {len(prompts)} prompts are sampled"
            progress.note("\n".join([*pace.budget.total(), stopped, f"continue with: {folder.resume_command()}"]))
            return 130
        rows = file.rows(number for number, _ in prompts)
        summary = write_selection(rows, folder.path, plan.config) | pace.speed()
    write_json(folder.path / SUMMARY, summary)
    counts = ("prompts", "completions", "failed", "empty", "kept", "pairs", "prompts_without_pair")
    parts = [f"{summary[name]} {name.replace('_', ' ')}" for name in counts if name in summary]
    rewards = {"reward_mean": "mean reward", "reward_best_mean": "mean of the best"}
    parts += [f"{name} {summary[key]:.3f}" for key, name in rewards.items() if key in summary]
    warnings = [f"warning: {line}" for line in selection_warnings(summary, plan.config)]
    progress.note("\n".join([f"summary    {', '.join(parts)}", *warnings, *pace.budget.total()]))
    shares = {key: count / summary["completions"] for key, count in summary["truncated_by"].items()}
    warn_of_limits(progress, plan, summary["truncated"] / summary["completions"], shares)
    progress.note(f"done: {folder.path / 'kept.jsonl'}")
    return 0


def check_sampled(file: SampleFile, sampled: list[Numbered]) -> None:
    """Refuse changed data: a number is a place in an order, and may mean another prompt now."""
    rows = file.rows(number for number, _ in sampled)
    for (number, prompt), row in zip(sampled, rows, strict=True):
        now = json.loads(line_of(prompt_row(prompt)))
        moved = Path(row["source"]).name != Path(prompt.source).name
        if moved or any(row.get(key) != now.get(key) for key in ("id", *ASKED)):
            other = f'"number": {number} is another prompt than {prompt.place()}, which has that number now'
            why = "the data has changed since this run began; choose another --name"
            raise ConfigError(f"{file.path}: {other}: {why}")


def budget_for(config: SamplingConfig, folder: RunFolder) -> FailureBudget:
    return FailureBudget(config.reward.max_failure_share, 0, failure_files(config.reward, folder.path))


@dataclass(slots=True)
class Pace:
    """The pace of sampling, reported every few seconds."""

    progress: Progress
    done: int  # prompts
    budget: FailureBudget
    scored: bool = True
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        self.started = self.reported = self.progress.started = time.monotonic()
        self.progress.first_step = self.done

    def add(self, group: Group) -> None:
        self.done += 1
        self.tokens += sum(one.sampled_tokens() for one in group)
        self.rewards += [one.reward for one in group if one.reward is not None and self.scored]
        self.budget.add(group)
        if time.monotonic() - self.reported > REPORT_SECONDS or self.done == self.progress.total:
            self.reported = time.monotonic()
            metrics = {"reward/mean": fmean(self.rewards)} if self.rewards else {}
            metrics["speed/tokens_per_second"] = self.tokens / (self.reported - self.started)
            self.progress.step(self.done, metrics)
            for line in self.budget.news():
                self.progress.note(line)

    def speed(self) -> Row:
        """Return seconds and tokens per second; nothing where nothing was left to sample."""
        seconds = self.reported - self.started
        return {"seconds": seconds, "tokens_per_second": self.tokens / seconds} if self.tokens else {}


def sample(
    plan: SamplingPlan[GenerateConfig], left: list[Numbered], file: SampleFile, folder: RunFolder, pace: Pace
) -> bool:
    """Sample what is left, and return whether all is done; an interrupt drops what is in flight."""
    config, rollout = plan.config, plan.rollout
    in_flight = 2 * rollout.max_sequences * plan.layout.engines
    stopping = "stopping as soon as one more prompt is sampled; interrupt again to stop at once"
    interrupts = Interrupts(lambda message: pace.progress.note(stopping))
    with open_job(plan, folder, pace.progress) as sampling, pace.progress, interrupts:
        seed, played = config.seed if rollout.seeded else None, bool(config.environment.kind())
        sampler = sampling.sampler(rollout, rollout.max_new_tokens, config.samples, seed, "generate")
        pace.begin()
        for place, group in sample_each(sampler, left, sampling.loop, in_flight=in_flight):
            keep_pictures(group[0].prompt, folder.path)
            file.add(row_of(left[place][0], group, scored=config.has_reward(), played=played))
            pace.add(group)
            if interrupts.has_request():
                break
    return pace.done == pace.progress.total


def warn_of_limits(
    progress: Progress, plan: SamplingPlan[Kind], share: float, limits: dict[str, float], place: str = ""
) -> None:
    if share > CUT_OFF:
        found = truncation_findings(WATCH, share, limits, plan.config)
        progress.report(replace(found, what=f"{place}{found.what}"))


def selection_warnings(summary: Row, config: GenerateConfig) -> list[str]:
    """Say why nothing was selected, where that is so."""
    found, best = [], summary.get("reward_best_mean")
    if not summary["kept"] and config.keep == "threshold" and best is not None:
        short = f"no reward reached threshold={config.threshold:g} (mean of the best {best:.3f})"
        found.append(f"nothing was kept: {short}: lower it, or raise samples")
    elif not summary["kept"]:
        found.append("nothing was kept: every completion failed, was empty or was cut off (rollout.max_new_tokens)")
    if config.pairs and not summary["pairs"]:
        remedy = "raise samples or rollout.temperature, or use a reward that tells completions apart"
        found.append(f"no prompt has a pair: its completions have equal rewards or equal texts, or failed: {remedy}")
    return found


def prepare_eval(config: EvalConfig, start: Start) -> Job:
    """Prepare an evaluation; one that is resumed begins anew."""
    return job_of(plan_eval(config), evaluate)


def evaluate(plan: SamplingPlan[EvalConfig], folder: RunFolder, progress: Progress) -> int:
    config, evaluation = plan.config, plan.config.evaluation
    sets = {name: list(one.prompts) for name, one in plan.sets.items()}
    pace = Pace(progress, 0, budget_for(config, folder))
    with open_job(plan, folder, progress) as sampling, progress:
        longest, count = plan.rollout.max_new_tokens, evaluation.samples
        sampler = sampling.sampler(evaluation, longest, count, config.seed, "evaluate")
        pace.begin()
        metrics, trajectories = Evaluator(sampler, sets, evaluation, sampling.loop).run(pace.add)
    played = bool(config.environment.kind())
    groups = [trajectories[at : at + count] for at in range(0, len(trajectories), count)]
    for one in groups:
        keep_pictures(one[0].prompt, folder.path)
    with write_aside(folder.transcripts) as stream:
        stream.writelines(line_of(row_of(at, one, scored=True, played=played)) for at, one in enumerate(groups))
    counts = {name: len(prompts) for name, prompts in sets.items()}
    write_json(folder.path / EVALUATION, {"model": config.model.path, "prompts": counts, "metrics": metrics})
    progress.console.print(evaluation_table(metrics, counts, count))
    if reported := environment_names(groups):
        columns = ("mean of an episode", *(name or "evaluation" for name in sets))
        table = Table(*(Column(column, overflow="fold") for column in columns))
        for name in reported:
            table.add_row(name, *(format_number(metrics.get(f"{prefix_of(one)}{name}")) for one in sets))
        progress.console.print(table)
    for name in sets:
        prefix, place = prefix_of(name), f"{name}: " if name else ""
        warn_of_limits(progress, plan, metrics[f"{prefix}truncated_share"], limits_in(metrics, prefix), place)
    done = f"done: {folder.path / EVALUATION}, completions in {folder.transcripts.name}"
    progress.note("\n".join([*pace.budget.total(), done]))
    return 0


def evaluation_table(metrics: dict[str, float], prompts: dict[str, int], samples: int) -> Table:
    """Make a table with a row per set; `±` is the half width of the 95 % confidence interval over prompts."""
    at_k = [f"pass@{samples}", f"maj@{samples}"] if samples > 1 else []
    columns = [Column(name, no_wrap=True) for name in ("prompts", f"mean@{samples}", *at_k, "failed")]
    table = Table(Column("set", overflow="fold"), *columns)  # a name may be long; numbers stay whole
    for name, count in prompts.items():
        prefix = prefix_of(name)
        mean = format_number(metrics.get(f"{prefix}reward"), metrics.get(f"{prefix}reward_ci95"))
        passes = [format_number(metrics.get(f"{prefix}{key}")) for key in at_k]
        table.add_row(name or "evaluation", str(count), mean, *passes, f"{metrics[f'{prefix}failed_share']:.1%}")
    return table


def format_number(value: float | None, width: float | None = None) -> str:
    return "-" if value is None else f"{value:.3f}" + (f" ± {width:.3f}" if width is not None else "")
