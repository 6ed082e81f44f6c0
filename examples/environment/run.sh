#!/usr/bin/env bash
# A small model learns a word game of three turns by PPO: bash examples/environment/run.sh FOLDER [key=value ...]
set -euo pipefail
here=$(dirname "$0") folder=$1
python "$here/prepare.py" "$folder"
trueline sft --model "$folder/model" --data "$folder/teacher.jsonl" --name sft folder="$folder" runtime=local \
  samples_per_step=64 epochs=2 training.learning_rate=2e-3 checkpoint.every=0
trueline ppo --model "$folder"/sft/checkpoints/step_*/model --data "$folder/practice.jsonl" \
  --environment "$here/game.py:Circle" --name ppo folder="$folder" algorithm.credit=turn algorithm.gamma=0.1 \
  steps=24 prompts_per_step=128 minibatches=2 rollout.max_new_tokens=40 environment.max_turn_tokens=3 \
  training.learning_rate=4e-4 critic.learning_rate=1e-3 algorithm.kl.coefficient=0 "${@:2}"
