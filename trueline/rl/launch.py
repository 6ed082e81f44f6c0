"""From a configuration of reinforcement learning to a finished run."""

from trueline.config.rl import RLConfig
from trueline.rl.build import rl_trainer
from trueline.rl.estimates import describe_plan
from trueline.rl.plan import plan_rl
from trueline.runs.launch import Start, launch, named


def launch_rl(config: RLConfig, verb: str, *, dry_run: bool = False, resume: bool = False) -> int:
    plan = plan_rl(named(config, verb))
    start, about = Start(verb, dry_run, resume), describe_plan(plan)
    return launch(plan.config, start, about, plan.config.steps, lambda *parts: rl_trainer(plan, *parts))
