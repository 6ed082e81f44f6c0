#!/usr/bin/env bash
# A small model learns to name colours in pictures by GRPO: bash examples/pictures/run.sh FOLDER [key=value ...]
set -euo pipefail
here=$(dirname "$0") folder=$1
python "$here/prepare.py" "$folder" "${SEED:-0}"
trueline sft --model "$folder/model" --data "$folder/teacher.jsonl" --name sft folder="$folder" runtime=local \
  samples_per_step=64 epochs=8 training.learning_rate=1e-3 checkpoint.every=0
trueline grpo --model "$folder"/sft/checkpoints/step_*/model --data "$folder/practice.jsonl" --reward exact --name grpo \
  folder="$folder" seed="${SEED:-0}" model.train_vision=all steps=60 prompts_per_step=24 algorithm.group_size=8 \
  rollout.max_new_tokens=6 training.learning_rate=5e-4 algorithm.kl.coefficient=0 evaluation.every=60 \
  evaluation.sets.held_out="$folder/held_out.jsonl" evaluation.sets.exchanged="$folder/exchanged.jsonl" "${@:2}"
