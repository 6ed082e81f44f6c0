#!/usr/bin/env bash
# A small model learns to carry by posing sums to itself: bash examples/self_play/run.sh FOLDER [key=value ...]
set -euo pipefail
here=$(dirname "$0") folder=$1
python "$here/prepare.py" "$folder"
trueline sft --model "$folder/model" --data "$folder/teacher.jsonl" --name sft folder="$folder" runtime=local \
  samples_per_step=64 epochs=4 training.learning_rate=2e-3 checkpoint.every=0
trueline dr_grpo --config "$here/self_play.yaml" --model "$folder"/sft/checkpoints/step_*/model \
  --data "$folder/practice.jsonl" --eval-data "$folder/held_out.jsonl" --name self_play folder="$folder" \
  environment.function="$here/game.py:Sums" "${@:2}"
