"""The command line with an engine whose tokens take long: `python -m tests.support.slow_run grpo ...`."""

import sys
from dataclasses import replace

from trueline.cli import main
from trueline.config.rl import RolloutConfig
from trueline.rollout.engines import ROLLOUT_ENGINES, vllm_environment


def one_thread(rollout: RolloutConfig, gpus: int) -> dict[str, str]:
    """Let the engine compute alike, whether it shares the cores with the trainer or not."""
    return vllm_environment(rollout, gpus) | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    slow = replace(ROLLOUT_ENGINES["vllm"], path="tests.support.slow_engine:SlowEngine", environment=one_thread)
    ROLLOUT_ENGINES["vllm"] = slow
    sys.exit(main())
