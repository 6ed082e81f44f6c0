#!/usr/bin/env bash
# Two machines by hand, say A and B, in one private network; /shared is a file system that both see.
#
#   on A    examples/launch/two_machines.sh head
#   on B    examples/launch/two_machines.sh join ADDRESS_OF_A
#   on A    examples/launch/two_machines.sh train ADDRESS_OF_A
#   on both ray stop, when you are done
#
# Both need the same Python, the same `pip install` of Trueline, and one token: whoever has it can run code there.
# `head` creates it if there is none. Copy it to B yourself: scp -p ~/.ray/auth_token B:.ray/
set -euo pipefail
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
port=6379

case "${1:-}" in
  head)
    (umask 077 && ray get-auth-token --generate > /dev/null) # a file that only its owner can read
    ray start --head --port="$port" --disable-usage-stats
    ;;
  join)
    ray get-auth-token > /dev/null # fails if the token is missing
    ray start --address="$2:$port" --disable-usage-stats
    ;;
  train)
    export RAY_ADDRESS="$2:$port" # without it a run starts its own Ray on this machine
    trueline grpo --model /shared/model --data /shared/prompts.jsonl --reward math \
      --name two-machines folder=/shared/runs training.deepspeed.zero_stage=3
    ;;
  *)
    echo "usage: $0 head | join ADDRESS | train ADDRESS" >&2
    exit 2
    ;;
esac
