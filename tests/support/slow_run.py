"""The command line with an engine whose tokens take long: `python -m tests.support.slow_run grpo ...`."""

import sys
from dataclasses import replace

from trueline.cli import main
from trueline.rollout.engines import ROLLOUT_ENGINES

if __name__ == "__main__":
    ROLLOUT_ENGINES["vllm"] = replace(ROLLOUT_ENGINES["vllm"], path="tests.support.slow_engine:SlowEngine")
    sys.exit(main())
