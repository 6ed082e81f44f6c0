#!/usr/bin/env bash
# The classic pipeline, stage by stage: SFT -> preference pairs -> reward model -> PPO, and -> DPO.
#
#   examples/rlhf/run.sh rlhf        (a new folder; minutes on a laptop)
set -euo pipefail
keys="$(cd "$(dirname "$0")" && pwd)"
python "$keys/prepare.py" "$1"
cd "$1"

newest() { echo runs/"$1"/checkpoints/*/model; }

trueline sft --config "$keys/sft.yaml" --model model --data teacher.jsonl --name sft
trueline generate --config "$keys/compare.yaml" --model "$(newest sft)" --data practice.jsonl --reward exact --name compare
trueline rm --config "$keys/rm.yaml" --model "$(newest sft)" --data runs/compare/pairs.jsonl --name rm
trueline ppo --config "$keys/ppo.yaml" --model "$(newest sft)" --data practice.jsonl --reward "$(newest rm)" --name ppo
trueline dpo --config "$keys/dpo.yaml" --model "$(newest sft)" --data runs/compare/pairs.jsonl --name dpo

for stage in sft ppo dpo; do
  trueline eval --config "$keys/eval.yaml" --model "$(newest "$stage")" --eval-data held_out.jsonl --reward exact --name "eval-$stage"
done
