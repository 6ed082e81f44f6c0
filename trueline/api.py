"""Runs from Python, and what the command line shares with them; heavy libraries load only when a run starts."""

import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.cluster_address import check_address
from trueline.config.base import ConfigError, Tree, likeness, merge, read_tree, tree_with
from trueline.config.foreign_names import FOREIGN_VERBS
from trueline.config.run import RunConfig
from trueline.files import read_rows
from trueline.monitoring.findings import Finding
from trueline.monitoring.progress import Follower, NotebookPanel
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.monitoring.timing import START
from trueline.monitoring.user_files import found_again
from trueline.objects import Objects, is_splits, reward_section
from trueline.report.curves import svg_curve
from trueline.verbs import VERBS, Verb

if TYPE_CHECKING:
    from trueline.doctor.table import Findings
    from trueline.monitoring.transcripts import LazyRows
    from trueline.runs.launch import Job

INTERRUPTED = 130
CURVES = (("reward/mean", "evaluation/reward"), ("loss", "evaluation/loss"))  # the first pair that a run has
Resume = bool | str | os.PathLike[str]  # whether to, or which run


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves as an SVG file, and as a picture in a notebook."""

    file: Path
    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and what is in its folder."""

    folder: Path
    status: int | None = (
        None  # 0: complete; 130: interrupted, and can be resumed; None: under way, or opened by its folder
    )
    follower: Follower | None = field(default=None, repr=False, compare=False)  # where `on_step` is called with it

    def __fspath__(self) -> str:
        """Return the folder, so that a run can be a model, data or the run to resume."""
        return str(self.folder)

    def stop(self) -> None:
        """End the run after this step, with a checkpoint: for `on_step`, which is called with the run."""
        if self.follower is None:
            raise ConfigError(f"{self.folder.name} can be stopped by its on_step alone; Ctrl-C stops it from outside")
        self.follower.stops = True

    @property
    def metrics(self) -> Any:
        """Read the metrics of each step: a pandas DataFrame if pandas is installed, else a list of dictionaries."""
        rows = read_rows(RunFolder(self.folder).metrics)
        if find_spec("pandas") is None:
            return rows
        import pandas  # noqa: PLC0415

        return pandas.DataFrame(rows)

    @property
    def findings(self) -> list[Finding]:
        """Read what the plan, the doctor, the start and the steps found."""
        return [finding for _, finding in RunFolder(self.folder).read_findings()]

    @property
    def model(self) -> Path:
        """Find the model folder of the newest checkpoint, or of the last round."""
        from trueline.training.export import find_checkpoint  # noqa: PLC0415

        return find_checkpoint(self.folder) / "model"

    @property
    def transcripts(self) -> "LazyRows":
        """Open the transcripts, per-token numbers as arrays; a row is read on access."""
        from trueline.monitoring.transcripts import LazyRows, with_arrays  # noqa: PLC0415

        return LazyRows(RunFolder(self.folder).transcripts, read=with_arrays)

    @property
    def samples(self) -> "LazyRows":
        """Open the completions of `generate`, in the order of the prompts; a row is read on access."""
        from trueline.monitoring.transcripts import LazyRows  # noqa: PLC0415

        return LazyRows(self.folder / "samples.jsonl", key=lambda row: int(row["id"]))

    @property
    def evaluation(self) -> dict[str, float]:
        """Read the metrics of `eval`."""
        found: dict[str, float] = json.loads((self.folder / "evaluation.json").read_text())["metrics"]
        return found

    def plot(self, *names: str) -> Curves:
        """Draw the named metrics, by default rewards or losses, and write curves.svg into the folder."""
        rows = read_rows(RunFolder(self.folder).metrics)
        known = {name: None for row in rows for name in row}
        chosen = names or next((some for some in CURVES if known.keys() & set(some)), ())
        if missing := [name for name in names or ["reward/mean"] * (not chosen) if name not in known]:
            raise ConfigError(f"{self.folder} has no metric {missing[0]!r}; it has {', '.join(known) or 'none'}")
        series = {name: [(row["step"], row[name]) for row in rows if name in row] for name in chosen if name in known}
        drawn = Curves(self.folder / "curves.svg", svg_curve(series, self.folder.name))
        drawn.file.write_text(drawn.svg)
        return drawn


OnStep = Callable[[Run, dict[str, Any]], object]


class RunFailed(RuntimeError):
    """A run that failed; the message is its last error and its folder."""

    def __init__(self, run: Run) -> None:
        # Of the run, or of a stage inside it.
        files = sorted(run.folder.glob("**/findings.jsonl"), key=lambda file: file.stat().st_mtime)
        errors = [error for file in files if (error := RunFolder(file.parent).last_error()) is not None]
        super().__init__(f"{errors[-1].line() if errors else 'the run failed'}\nrun folder: {run.folder}")
        self.run, self.folder = run, run.folder


def train(
    verb: str,
    config: str | Path | Tree | None = None,
    *,
    resume: Resume = False,
    restart: bool = False,
    dry_run: bool = False,
    on_step: OnStep | Sequence[OnStep] = (),
    **keys: Any,
) -> Run:
    """Run a verb of the command line: `model`, `data`, `eval_data`, `reward` and `name` as there, and any other key.

    A key is a nested dictionary or a name with dots. A reward can be a function, or a dictionary of several by name;
    `environment` a class or a function, `agent` a function, `tools` a list with functions in it; data can be a list of
    rows or texts, a `datasets.Dataset` or `DatasetDict`, or a `Run` of `generate`; a model can be a `Run`. `resume` can
    name the run to continue. `on_step` is called with the run and the metrics of each step.
    """
    if verb not in VERBS:
        raise ConfigError(unknown_verb(verb, VERBS))
    if on_step and not VERBS[verb].is_training:
        raise ConfigError(f"on_step follows the steps of training, and {verb} has none of its own: leave it out")
    given = read_tree(Path(config)) if isinstance(config, str | Path) else keyword_tree(VERBS[verb], config or {})
    asked = merge(given, keyword_tree(VERBS[verb], keys))
    objects = Objects(Path(str(asked.get("folder", RunConfig().folder))).resolve() / "objects")
    loaded = load_config(verb, objects.with_file_names(asked), resume=resume, restart=restart)
    folder = Path(loaded.folder).resolve() / (loaded.name or unused_name(verb, Path(loaded.folder)))
    objects.write()
    for line in objects.remarks:
        say(line)
    planned, follower = loaded.with_keys({"name": folder.name}), following(Run(folder), on_step)
    run = Run(folder, start(verb, planned, resume=bool(resume), dry_run=dry_run, follower=follower))
    if run.status not in (0, INTERRUPTED):
        raise RunFailed(run)
    return run


def following(run: Run, on_step: OnStep | Sequence[OnStep]) -> Follower:
    """Return what calls each of these functions after a step, with a run that they can stop."""
    functions = [on_step] if callable(on_step) else list(on_step)
    follower = Follower(lambda metrics: [function(followed, metrics) for function in functions])
    followed = replace(run, follower=follower)
    return follower


def live_plot(*names: str) -> OnStep:
    """Return an `on_step` that draws the named metrics below a notebook's cell, as `Run.plot`, after every step."""
    if find_spec("IPython") is None:
        raise ConfigError(
            "live_plot draws in a notebook, and IPython is not installed: leave it out, or use run.plot()"
        )
    panel = NotebookPanel()

    def draw(run: Run, metrics: dict[str, Any]) -> None:
        known = {name for row in read_rows(RunFolder(run.folder).metrics) for name in row}
        if (present := [name for name in names if name in known]) or not names:
            panel.update(run.plot(*present))

    return draw


def load(
    source: str | os.PathLike[str], *, dtype: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load the model of a run, a checkpoint or a folder as Transformers has it, adapters merged, and its tokenizer."""
    from trueline.plan.inputs import run_model  # noqa: PLC0415
    from trueline.training.export import open_model  # noqa: PLC0415

    taken = run_model(os.fspath(source), "trueline.load")
    return open_model(Path(taken[0] if taken else source), dtype, trust_remote_code=trust_remote_code)


def generate(config: str | Path | Tree | None = None, **keys: Any) -> Run:
    """Sample completions, with rewards if there is a reward; arguments as in `train`."""
    return train("generate", config, **keys)


def evaluate(config: str | Path | Tree | None = None, **keys: Any) -> Run:
    """Evaluate a model on held-out prompts, `data`; other arguments as in `train`."""
    return train("eval", config, **keys)


def keyword_tree(command: Verb, keys: Tree) -> Tree:
    """Return the tree of keyword arguments; a dictionary is a section, even if a flag has its name."""
    flags = {flag.removeprefix("--").replace("-", "_"): key for flag, key in command.flags.items()}
    tree: Tree = {}
    names: dict[str, str] = {}
    for name, value in keys.items():
        if isinstance(value, dict) and not is_splits(value):
            path, value = name, reward_section(value) if name == "reward" else value
        else:
            path = flags.get(name, name)
        if (other := names.setdefault(path, name)) != name and value is not keys[other]:
            raise ConfigError(f"{other} and {name} are the same key, {path}: give only one of them")
        tree = merge(tree, tree_with(path, value))
    return tree


def unused_name(verb: str, folder: Path) -> str:
    """Name a run by the time; several may start in the same second."""
    name = default_name(verb)
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(name for name in names if not (folder / name).exists())


# Shared with the command line


def load_config(verb: str, asked: Tree, *, resume: Resume = False, restart: bool = False) -> RunConfig:
    """Check the keys of a verb; with `resume`, add those of the run to continue: the named one or the latest."""
    command = VERBS[verb]
    if not isinstance(resume, bool):
        asked = merge(asked, named_run(os.fspath(resume), asked))
    if restart and not resume:
        raise ConfigError("--restart needs --resume, which finds the run to start over: give both, or neither")
    if resume and "/" in (name := str(asked.get("name"))):  # the run's folder itself
        asked = merge(asked, {"folder": str(Path(name).parent), "name": Path(name).name})
    config = command.kind.parse(merge(command.defaults, asked))
    if not resume:
        return config
    folder = RunFolder.find(config.folder, config.name, verb)
    say(f"resume     {folder.path}" + ("" if config.name else f", the latest {verb} run"))
    folder.check_idle()
    if command.is_training and restart and folder.has_checkpoint():
        raise ConfigError(f"{folder.path} has a checkpoint to resume from: drop --restart, or choose another --name")
    if command.is_training and not restart and not folder.has_checkpoint():
        start_over = "add --restart to start it over at step 0, or choose another --name"
        raise ConfigError(f"{folder.path} has no checkpoint yet: {start_over}")
    saved = found_again(read_tree(folder.config), folder.path.parent)
    try:
        command.kind.parse(saved)
    except ConfigError as error:
        raise ConfigError(f"{folder.config} is from another verb than {verb}, or was edited: {error}") from None
    config = command.kind.parse(merge(saved, asked))
    if config.runtime != saved["runtime"]:
        config = command.kind.parse(merge(drop_placement(saved), asked))
    return config.with_keys({"name": folder.path.name, "folder": str(folder.path.parent)})


def named_run(word: str, asked: Tree) -> Tree:
    """Return the keys that name the run after --resume: a folder, or a name in the folder of runs."""
    name, place = asked.get("name"), Path(word).expanduser().resolve()
    if not RunFolder(place).config.is_file() and "/" not in word:
        place = Path(str(asked.get("folder", RunConfig().folder))).resolve() / word
    if name is not None and str(name) != place.name:
        raise ConfigError(f"--resume {word} and --name {name} are two runs: give only one of them")
    near = place.parent if RunFolder(place.parent).config.is_file() else place.parents[1]
    if not RunFolder(place).config.is_file() and RunFolder(near).config.is_file():
        raise ConfigError(f"--resume {word} is inside a run, which resumes from its newest checkpoint: give {near}")
    return {"name": place.name, "folder": str(place.parent)}


def drop_placement(saved: Tree) -> Tree:
    """Drop the keys that a run filled in for its runtime: engines, their counts, and the placement."""
    sections = {name: part for name, part in saved.items() if isinstance(part, dict)}
    rest = {name: part for name, part in saved.items() if name not in {*sections, "placement"}}
    places = ("engine", "engines", "ranks")
    return rest | {name: {key: part[key] for key in part if key not in places} for name, part in sections.items()}


def start(
    verb: str, config: RunConfig, *, resume: bool = False, dry_run: bool = False, follower: Follower | None = None
) -> int:
    """Start a run, or print its plan, and return the exit status."""
    prepare_libraries(config)
    from trueline.report.page import write_report  # noqa: PLC0415
    from trueline.runs.launch import launch  # noqa: PLC0415

    prepare = pkgutil.resolve_name(VERBS[verb].prepare)
    follower = follower or Follower()
    follower.write_report = lambda run, file: write_report({run.path.name: run}, file)
    START.end("libraries")
    return launch(config, verb, prepare, dry_run=dry_run, resume=resume, look=look_at, follower=follower)


def look_at(job: "Job") -> list[Finding]:
    """Return what the doctor finds in a plan, for runs that have one of their own."""
    from trueline.doctor.examination import findings_at_start  # noqa: PLC0415

    return findings_at_start(job.config, job.reading, job.findings) if job.reading else []


def examine(verb: str, config: RunConfig, *, resume: bool = False, deep: bool = False) -> "Findings":
    """Check a run without starting it, and return the findings by family; `deep` tries one step of it."""
    if deep and not VERBS[verb].is_training:
        raise ConfigError(f"doctor {verb} --deep: {verb} trains no model that could be tried; drop --deep")
    prepare_libraries(config)
    from trueline.doctor import examination  # noqa: PLC0415

    return examination.examine(config, verb, VERBS[verb].prepare, resume=resume, deep=deep)


def prepare_libraries(config: RunConfig) -> None:
    START.begin()
    address, named = config.cluster.address, os.environ.get("RAY_ADDRESS")
    if warning := check_address(address or named or "auto", "cluster.address" if address else "RAY_ADDRESS"):
        say(warning)
    if address:
        os.environ["RAY_ADDRESS"] = address  # before Ray is imported
    quiet_libraries()


def suggest_verbs(word: str, verbs: Collection[str]) -> list[str]:
    """Return the most similar verb, or those that other libraries call so (`train_ppo_ray`, `GRPOTrainer`)."""
    small = word.lower()
    parts = dict.fromkeys([small, *re.split(r"train(?:er)?|[_-]", small)])
    foreign = [verb for part in parts for verb in FOREIGN_VERBS.get(part, ())]
    nearest = max(verbs, key=lambda verb: likeness(small, verb))
    return (
        [nearest] * (likeness(small, nearest) >= 0.85)
        or [verb for verb in FOREIGN_VERBS.get(small, ()) if verb in verbs]
        or [part for part in parts if part in verbs]
        or [verb for verb in foreign if verb in verbs]
        or [nearest] * (likeness(small, nearest) >= 0.65)
    )


def unknown_verb(word: str, verbs: Collection[str]) -> str:
    near = " or ".join(map(repr, suggest_verbs(word, verbs)))
    return f"unknown verb {word!r}; " + (f"did you mean {near}?" if near else "`trueline -h` lists every verb")


def say(message: str) -> None:
    sys.stderr.write(message + "\n")


def quiet_libraries() -> None:
    """Configure libraries before they are imported: no progress bars, no advice, no telemetry; then import PyTorch."""
    if "torch" not in sys.modules:
        say("loading    libraries")  # which takes seconds: a verb's first line comes before
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Waiting OpenMP threads spin; if they take every core, any other program stalls them all.
        "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) - 1, 1)),
    }.items():
        os.environ.setdefault(name, value)
    import torch  # noqa: PLC0415

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # it may be imported already
    from trueline.config.model import RanksConfig  # noqa: PLC0415
    from trueline.training.engines.table import TRAIN_ENGINES  # noqa: PLC0415

    for row in TRAIN_ENGINES.values():  # transformers imports DeepSpeed, which warns without
        os.environ.update(row.environment(RanksConfig(), torch.cuda.device_count()) | os.environ)
