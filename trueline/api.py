"""Runs from Python, and what the command line shares with them; heavy libraries are imported once a run starts."""

import json
import os
import pkgutil
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.cluster_address import check_address
from trueline.config.base import ConfigError, Tree, likeness, merge, nested, read_tree
from trueline.config.foreign_names import FOREIGN_VERBS
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.monitoring.curves import svg_curve
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.monitoring.user_files import found_again
from trueline.objects import Objects, is_splits, reward_section
from trueline.verbs import VERBS, Verb

if TYPE_CHECKING:
    from trueline.data.transcripts import LazyRows
    from trueline.doctor.findings import Findings
    from trueline.runs.launch import Job

INTERRUPTED = 130
CURVES = (("reward/mean", "evaluation/reward"), ("loss", "evaluation/loss"))  # the first that a run has any of
Rows = list[dict[str, Any]]
Resume = bool | str | os.PathLike[str]  # whether, or which run


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves as an SVG file, and as a picture in a notebook."""

    file: Path
    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended, and what it left in its folder."""

    folder: Path
    status: int | None = None  # 0: complete; 130: interrupted, and can be resumed; None: of an earlier run

    def __fspath__(self) -> str:
        """Stand for the folder, so that a run is a model, data or what is resumed."""
        return str(self.folder)

    @property
    def metrics(self) -> Any:
        """Read what each step reported: a pandas DataFrame where pandas is installed, else a list of dictionaries."""
        rows = read_rows(RunFolder(self.folder).metrics)
        if find_spec("pandas") is None:
            return rows
        import pandas  # noqa: PLC0415

        return pandas.DataFrame(rows)

    @property
    def model(self) -> Path:
        """Find the model folder of the newest checkpoint; that of the last round, where there are rounds."""
        from trueline.training.export import find_checkpoint  # noqa: PLC0415

        return find_checkpoint(self.folder) / "model"

    @property
    def transcripts(self) -> "LazyRows":
        """Open what was sampled, numbers of its tokens as arrays; a row is read when it is asked for."""
        from trueline.data.transcripts import LazyRows, with_arrays  # noqa: PLC0415

        return LazyRows(RunFolder(self.folder).transcripts, read=with_arrays)

    @property
    def samples(self) -> "LazyRows":
        """Open the completions that `generate` sampled, in the order of the prompts; each is read when asked for."""
        from trueline.data.transcripts import LazyRows  # noqa: PLC0415

        return LazyRows(self.folder / "samples.jsonl", key=lambda row: int(row["id"]))

    @property
    def evaluation(self) -> dict[str, float]:
        """Read the metrics that `eval` found."""
        found: dict[str, float] = json.loads((self.folder / "evaluation.json").read_text())["metrics"]
        return found

    def plot(self, *names: str) -> Curves:
        """Draw metrics by name, or rewards or losses where none is named, and write curves.svg into the folder."""
        rows = read_rows(RunFolder(self.folder).metrics)
        known = {name: None for row in rows for name in row}
        chosen = names or next((some for some in CURVES if known.keys() & set(some)), ())
        if missing := [name for name in names or ["reward/mean"] * (not chosen) if name not in known]:
            raise ConfigError(f"{self.folder} has no metric {missing[0]!r}; it has {', '.join(known) or 'none'}")
        series = {name: [(row["step"], row[name]) for row in rows if name in row] for name in chosen if name in known}
        drawn = Curves(self.folder / "curves.svg", svg_curve(series, self.folder.name))
        drawn.file.write_text(drawn.svg)
        return drawn


class RunFailed(RuntimeError):
    """A run that did not come to its end; the message is its last error and where its folder is."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"{last_error(run.folder)}\nrun folder: {run.folder}")
        self.run, self.folder = run, run.folder


def read_rows(file: Path) -> Rows:
    return [json.loads(line) for line in file.read_text().split("\n") if line] if file.exists() else []


def train(
    verb: str,
    config: str | Path | Tree | None = None,
    *,
    resume: Resume = False,
    restart: bool = False,
    dry_run: bool = False,
    **keys: Any,
) -> Run:
    """Run a verb of the command line: `model`, `data`, `eval_data`, `reward` and `name` as there, and any other key.

    A key is a nested dictionary or a name with dots. A reward can be a function, or a dictionary of several by name;
    `environment` a class or a function, `agent` a function, `tools` a list with functions in it; data can be a list of
    rows or texts, a `datasets.Dataset` or `DatasetDict`, or a `Run` of `generate`; a model can be a `Run`. `resume` can
    name the run to go on with.
    """
    if verb not in VERBS:
        raise ConfigError(unknown_verb(verb, VERBS))
    given = read_tree(Path(config)) if isinstance(config, str | Path) else tree_of(VERBS[verb], config or {})
    asked = merge(given, tree_of(VERBS[verb], keys))
    objects = Objects(Path(str(asked.get("folder", RunConfig().folder))).resolve() / "objects")
    loaded = load(verb, objects.named(asked), resume=resume, restart=restart)
    folder = Path(loaded.folder).resolve() / (loaded.name or unused_name(verb, Path(loaded.folder)))
    objects.write()
    for line in objects.remarks:
        say(line)
    run = Run(folder, start(verb, loaded.replaced({"name": folder.name}), resume=bool(resume), dry_run=dry_run))
    if run.status not in (0, INTERRUPTED):
        raise RunFailed(run)
    return run


def generate(config: str | Path | Tree | None = None, **keys: Any) -> Run:
    """Sample completions, with rewards if there is a reward; arguments as in `train`."""
    return train("generate", config, **keys)


def evaluate(config: str | Path | Tree | None = None, **keys: Any) -> Run:
    """Evaluate a model on held-out prompts, `data`; other arguments as in `train`."""
    return train("eval", config, **keys)


def tree_of(command: Verb, keys: Tree) -> Tree:
    """Return the tree that keyword arguments mean; a dictionary is a section, also where a flag has its name."""
    flags = {flag.removeprefix("--").replace("-", "_"): key for flag, key in command.flags.items()}
    tree: Tree = {}
    names: dict[str, str] = {}
    for name, value in keys.items():
        if isinstance(value, dict) and not is_splits(value):
            path, value = name, reward_section(value) if name == "reward" else value
        else:
            path = flags.get(name, name)
        if (other := names.setdefault(path, name)) != name and value is not keys[other]:
            raise ConfigError(f"{other} and {name} are the same key, {path}: give one of the two")
        tree = merge(tree, nested(path, value))
    return tree


def unused_name(verb: str, folder: Path) -> str:
    """Name a run by the time; small ones may begin in the same second."""
    name = default_name(verb)
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(name for name in names if not (folder / name).exists())


def last_error(folder: Path) -> str:
    """Return what was said last of an error, by the run or by a stage inside it."""
    logs = sorted(folder.glob("**/logs/run.log"), key=lambda log: log.stat().st_mtime)
    said = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    starts = [place for place, line in enumerate(said) if line.startswith("error: ")]
    return "\n".join(said[starts[-1] :]) if starts else "the run failed"


# What the command line does too


def load(verb: str, asked: Tree, *, resume: Resume = False, restart: bool = False) -> RunConfig:
    """Check what is asked of a verb; a run to go on with, the named one or the last, adds what it was begun with."""
    command = VERBS[verb]
    if not isinstance(resume, bool):
        asked = merge(asked, named_run(os.fspath(resume), asked))
    if restart and not resume:
        raise ConfigError("--restart starts a run over that --resume finds: give both, or neither for a new run")
    if resume and "/" in (name := str(asked.get("name"))):  # the run's folder itself
        asked = merge(asked, {"folder": str(Path(name).parent), "name": Path(name).name})
    config = command.kind.parse(merge(command.defaults, asked))
    if not resume:
        return config
    folder = RunFolder.find(config.folder, config.name, verb)
    say(f"resume     {folder.path}" + ("" if config.name else f", the {verb} run that was touched last"))
    folder.check_idle()
    if trains(command):
        check_start(folder.path, folder.has_checkpoint(), restart)
    saved = found_again(read_tree(folder.config), folder.path.parent)
    try:
        command.kind.parse(saved)
    except ConfigError as error:
        raise ConfigError(f"{folder.config} is not of a {verb} run, or was changed: {error}") from None
    config = command.kind.parse(merge(saved, asked))
    if config.runtime != saved["runtime"]:
        config = command.kind.parse(merge(without_places(saved), asked))
    return config.replaced({"name": folder.path.name, "folder": str(folder.path.parent)})


def named_run(word: str, asked: Tree) -> Tree:
    """Return the keys that name the run behind --resume: a folder, or a name in the folder of runs."""
    name, place = asked.get("name"), Path(word).expanduser().resolve()
    if not RunFolder(place).config.is_file() and "/" not in word:
        place = Path(str(asked.get("folder", RunConfig().folder))).resolve() / word
    if name is not None and str(name) != place.name:
        raise ConfigError(f"--resume {word} and --name {name} are two runs: give one of the two")
    near = place.parent if RunFolder(place.parent).config.is_file() else place.parents[1]
    if not RunFolder(place).config.is_file() and RunFolder(near).config.is_file():
        raise ConfigError(f"--resume {word} is inside a run, which goes on from its newest checkpoint: give {near}")
    return {"name": place.name, "folder": str(place.parent)}


def without_places(saved: Tree) -> Tree:
    """Leave out what a run had filled in for its runtime: engines, how many there are of each, and who shares GPUs."""
    sections = {name: part for name, part in saved.items() if isinstance(part, dict)}
    rest = {name: part for name, part in saved.items() if name not in {*sections, "placement"}}
    places = ("engine", "engines", "ranks")
    return rest | {name: {key: part[key] for key in part if key not in places} for name, part in sections.items()}


def trains(command: Verb) -> bool:
    """Tell whether a verb goes on from checkpoints; other jobs do from what they have written."""
    return issubclass(command.kind, RLConfig | SupervisedConfig)


def check_start(run: Path, has_checkpoint: bool, restart: bool) -> None:
    if has_checkpoint and restart:
        raise ConfigError(f"{run} has a checkpoint to go on from: leave --restart out, or choose another --name")
    if not has_checkpoint and not restart:
        raise ConfigError(
            f"{run} has no checkpoint yet and would start over at step 0: add --restart if it should, or choose "
            "another --name"
        )


def start(verb: str, config: RunConfig, *, resume: bool = False, dry_run: bool = False) -> int:
    """Do a run, or say what it would do, and return its exit status."""
    settle_libraries(config)
    from trueline.runs.launch import launch  # noqa: PLC0415

    prepare = pkgutil.resolve_name(VERBS[verb].prepare)
    return launch(config, verb, prepare, dry_run=dry_run, resume=resume, look=look_at)


def look_at(job: "Job") -> list[str]:
    """Say what the doctor finds in a plan, of runs that have one of their own."""
    from trueline.doctor.examination import said_at_start  # noqa: PLC0415

    return said_at_start(job.config, job.reading, job.about) if job.reading else []


def examine(verb: str, config: RunConfig, *, resume: bool = False, deep: bool = False) -> "Findings":
    """Look at a run without starting it, and return what was found, by family; `deep` tries one step of it."""
    if deep and not trains(VERBS[verb]):
        raise ConfigError(f"doctor {verb} has no --deep part, for its processes train nothing: leave --deep out")
    settle_libraries(config)
    from trueline.doctor import examination  # noqa: PLC0415

    return examination.examine(config, verb, VERBS[verb].prepare, resume=resume, deep=deep)


def settle_libraries(config: RunConfig) -> None:
    address, named = config.cluster.address, os.environ.get("RAY_ADDRESS")
    if warning := check_address(address or named or "auto", "cluster.address" if address else "RAY_ADDRESS"):
        say(warning)
    if address:
        os.environ["RAY_ADDRESS"] = address  # before Ray is imported
    quiet_libraries()


def unknown_verb(word: str, verbs: Collection[str]) -> str:
    """Name the verb that is nearest, or part of the word (`train_ppo_ray`, `GRPOTrainer`), or that others call so."""
    small = word.lower()
    parts = dict.fromkeys([small, *re.split(r"train(?:er)?|[_-]", small)])
    foreign = [verb for part in parts for verb in FOREIGN_VERBS.get(part, ())]
    nearest = max(verbs, key=lambda verb: likeness(small, verb))
    near = (
        [nearest] * (likeness(small, nearest) >= 0.85)
        or [verb for verb in FOREIGN_VERBS.get(small, ()) if verb in verbs]
        or [part for part in parts if part in verbs]
        or [verb for verb in foreign if verb in verbs]
        or [nearest] * (likeness(small, nearest) >= 0.65)
    )
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "`trueline -h` lists every verb"
    return f"unknown verb {word!r}; {remedy}"


def say(message: str) -> None:
    sys.stderr.write(message + "\n")


def quiet_libraries() -> None:
    """Quiet libraries before they are imported: no progress bars, no advice, no telemetry on the user's screen."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # OpenMP threads spin while they wait for each other; with every core taken, any other program stalls them all.
        "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) - 1, 1)),
    }.items():
        os.environ.setdefault(name, value)
    import torch  # noqa: PLC0415

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # it may be imported already
    from trueline.training.engines import TRAIN_ENGINES  # noqa: PLC0415

    for row in TRAIN_ENGINES.values():  # transformers imports DeepSpeed, which would warn without
        os.environ.update(row.environment(torch.cuda.device_count()) | os.environ)
