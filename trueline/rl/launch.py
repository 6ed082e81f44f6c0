"""Prepare a run of reinforcement learning from its configuration."""

from functools import partial

from trueline.config.rl import RLConfig
from trueline.rl.build import rl_trainer
from trueline.rl.estimates import describe_plan
from trueline.rl.plan import plan_rl
from trueline.runs.launch import Job, Start, training


def prepare_rl(config: RLConfig, start: Start) -> Job:
    plan = plan_rl(config)
    about, trainer = describe_plan(plan), partial(rl_trainer, plan)
    return training(plan.config, about, plan.config.steps, trainer, plan.reading())
