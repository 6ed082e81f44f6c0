#!/usr/bin/env bash
# The same with an existing agent, on the model from examples/tools:
# bash examples/agent/run.sh FOLDER [key=value ...]
set -euo pipefail
here=$(dirname "$0") folder=$1
trueline grpo --model "$folder"/sft/checkpoints/step_*/model --data "$folder/practice.jsonl" \
  --agent "$here/agent.py:main" --name agent folder="$folder" \
  steps=50 prompts_per_step=16 rollout.max_new_tokens=80 environment.max_turns=4 training.learning_rate=2e-4 \
  training.warmup_steps=8 \
  algorithm.loss_aggregation=token_mean algorithm.kl.coefficient=0 "${@:2}"
