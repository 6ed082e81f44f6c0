"""From a configuration of an offline task to a finished run, or to a look at its rows."""

import sys

from trueline.config.supervised import SupervisedConfig
from trueline.data.preview import render
from trueline.offline.build import supervised_trainer
from trueline.offline.plan import describe_plan, plan_supervised
from trueline.runs.launch import Start, launch, named


def launch_supervised(config: SupervisedConfig, verb: str, *, dry_run: bool = False, resume: bool = False) -> int:
    plan = plan_supervised(named(config, verb))
    start, about = Start(verb, dry_run, resume), describe_plan(plan)
    return launch(plan.config, start, about, plan.steps, lambda *parts: supervised_trainer(plan, *parts))


def show_preview(config: SupervisedConfig, rows: int) -> int:
    """The first rows as the model will see them, learnt stretches marked."""
    plan = plan_supervised(config, here=False)
    train = plan.material.train
    color = sys.stdout.isatty()
    sys.stdout.write(describe_plan(plan) + "\n")
    for number, sample in enumerate(train.samples[: rows * train.task.together]):
        row, part = divmod(number, train.task.together)
        which = f" {('chosen', 'rejected')[part]}" if train.task.together == 2 else ""
        sys.stdout.write(f"\nrow {row + 1}{which}: {render(sample, plan.chat.tokenizer, color)}\n")
    return 0
