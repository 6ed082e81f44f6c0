#!/usr/bin/env bash
# Two nodes of eight GPUs under SLURM: sbatch examples/launch/slurm.sh
#
# Activate the environment that has Trueline before `sbatch`; nodes see it, the home folder and /shared. Once before the
# first run: umask 077 && ray get-auth-token --generate (into ~/.ray/auth_token, for you alone).
#SBATCH --job-name=trueline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
set -euo pipefail
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
ray get-auth-token > /dev/null # fails if the token is missing

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000)) # different for each job on a shared node
cpus=$SLURM_CPUS_PER_TASK

srun --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --num-gpus=8 --block &
sleep 20 # until it listens
srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
  ray start --address="$address:$port" --num-cpus="$cpus" --num-gpus=8 --block &
sleep 20

# This script runs on the head. When it ends, SLURM ends Ray on all nodes. After a time limit, use --resume.
export RAY_ADDRESS="$address:$port"
trueline grpo --model /shared/model --data /shared/prompts.jsonl --reward math \
  --name slurm folder=/shared/runs training.deepspeed.zero_stage=3
