#!/usr/bin/env bash
# A model of 0.6 million parameters learns to use a tool: bash examples/tools/run.sh FOLDER [key=value ...]
set -euo pipefail
here=$(dirname "$0") folder=$1
python "$here/prepare.py" "$folder"
trueline sft --model "$folder/model" --data "$folder/teacher.jsonl" --name sft folder="$folder" runtime=local \
  samples_per_step=64 epochs=3 training.learning_rate=2e-3 checkpoint.every=0
trueline grpo --model "$folder"/sft/checkpoints/step_*/model --data "$folder/practice.jsonl" \
  --tools "$here/tools.py:draw" --reward "$here/tools.py:repeats_result" --name grpo folder="$folder" \
  steps=50 prompts_per_step=16 rollout.max_new_tokens=80 environment.max_turns=4 training.learning_rate=2e-4 \
  training.warmup_steps=8 \
  algorithm.loss_aggregation=token_mean algorithm.kl.coefficient=0 "${@:2}"
