#!/usr/bin/env bash
# Submits a run to a running Ray cluster (two_machines.sh head and join start one): it continues when this terminal is
# closed. Its driver, which reads data and runs rewards, is on the head.
#
#   examples/launch/ray_job.sh http://ADDRESS_OF_HEAD:8265 FOLDER_WITH_YOUR_REWARD
#
# Both ends need pip install 'ray[default]'. The address is that of Ray's dashboard, which listens only on the head;
# from elsewhere: ssh -L 8265:localhost:8265 HEAD. The folder is copied to the cluster (keep models and data out of it),
# so that reward.py is found there. The token is read from ~/.ray/auth_token; put no secret into the command or a
# runtime environment: Ray shows and logs both.
set -euo pipefail
export RAY_AUTH_MODE=token

ray job submit --address "$1" --working-dir "$2" -- \
  trueline grpo --model /shared/model --data /shared/prompts.jsonl --reward reward.py:reward \
  --name job folder=/shared/runs training.deepspeed.zero_stage=3
