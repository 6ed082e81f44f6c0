"""The model card of an exported model: what it learned from and how, what came of it, and the command of its run."""

import shlex
from collections.abc import Callable
from pathlib import Path
from string import Template

from trueline.config.base import Tree
from trueline.files import write_atomically
from trueline.monitoring.run_folder import RunFolder, flatten, without_password
from trueline.report.curves import svg_curve
from trueline.report.page import curve
from trueline.report.runs import ReportedRun, is_number

CURVE = "curve.svg"
PIPELINES = {"rm": "text-classification", "prm": "token-classification"}  # of verbs that train no language model
OF_PLACE = ("name", "folder", "cluster.", "monitoring.", "checkpoint.")  # keys of the machine and the disk
ABOUT = ("advantage", "loss", "averaging", "KL", "importance", "data", "batch", "length", "task", "rate")  # of a plan
SHOWN = ("reward/mean", "evaluation/", "loss", "distill/kl_per_token")  # metrics, by their beginning
CARD = Template("""---
library_name: transformers
pipeline_tag: $pipeline
${base}tags:
- trueline
- $verb
---

# $name

Trained with `trueline $verb` from `$start`: checkpoint $checkpoint of the run `$run`.
$picture
## Result

$table

## Training

```
$plan
```

The command, without keys of the machine; files are named without their folders:

```
$command
```

$versions
""")


def write_card(checkpoint: Path, folder: Path, usual_keys: Callable[[str], Tree]) -> None:
    """Write README.md and a curve into the folder of a model that was exported from a checkpoint of a run.

    `usual_keys` gives those of a verb, as they are if nobody sets them.
    """
    run = ReportedRun("run", RunFolder(checkpoint.parent.parent)).read()
    if not run.verb:  # a checkpoint that was copied out of its run
        return
    last = int(checkpoint.name.removeprefix("step_"))
    run.rows = [row for row in run.rows if row["step"] <= last]
    shown = [name for row in run.rows for name in row if name.startswith(SHOWN) and "ci95" not in name]
    names = list(dict.fromkeys(sorted(shown, key=lambda name: [name.startswith(one) for one in SHOWN], reverse=True)))
    if points := curve(run, names[0], 1) if names else []:
        write_atomically(folder / CURVE, svg_curve({names[0]: points}, names[0]))
    start = run.config.get("model.path", "")
    text = CARD.substitute(
        pipeline=PIPELINES.get(run.verb, "text-generation"),
        base=f"base_model: {start}\n" if is_hub_name(start) else "",
        verb=run.verb,
        name=folder.name,
        start=place_free(start),
        checkpoint=checkpoint.name,
        run=run.folder.path.name,
        picture=f"\n![{names[0]}]({CURVE})\n" if points else "",
        table=table(run, names),
        plan="\n".join(line for line in run.plan.splitlines() if line.split(" ")[0] in ABOUT),
        command=command(run, dict(flatten(usual_keys(run.verb)))),
        versions=", ".join(f"{name} {version}" for name, version in run.versions.items()),
    )
    write_atomically(folder / "README.md", text)


def table(run: ReportedRun, names: list[str]) -> str:
    lines = ["| metric | first | last |", "|---|---|---|"]
    for name in names:
        values = [(row["step"], row[name]) for row in run.rows if is_number(row.get(name))]
        ends = [f"{value:.4g} (step {step})" for step, value in (values[0], values[-1])] if values else ["", ""]
        lines.append(f"| `{name}` | {' | '.join(ends)} |")
    return "\n".join(lines)


def command(run: ReportedRun, usual: dict[str, str]) -> str:
    """Return the command of a run: keys that differ from the verb's own, without folders and passwords."""
    keys = {key: value for key, value in run.config.items() if usual.get(key) != value and not key.startswith(OF_PLACE)}
    words = [shlex.quote(f"{key}={place_free(value)}") for key, value in keys.items()]
    return " \\\n  ".join([f"trueline {run.verb}", *words])


def place_free(value: str) -> str:
    """Return the last name of a path on this machine; any other value as it is."""
    return Path(value).name if value.startswith(("/", "~")) else without_password(value)


def is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
