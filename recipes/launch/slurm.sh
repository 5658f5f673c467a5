#!/usr/bin/env bash
#SBATCH --job-name=heedful
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# One task per machine, which starts a rank per GPU:
#   sbatch recipes/launch/slurm.sh ppo config.yaml --output /shared/runs/ppo
# Five minutes before its time is over the job is asked to end. It then saves a checkpoint, ends with 143, and is queued again,
# where the same command goes on.
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD=$head NODES=$SLURM_NNODES PORT=$((20000 + SLURM_JOB_ID % 20000))
status=0
srun --kill-on-bad-exit=1 bash -c 'NODE=$SLURM_NODEID exec bash "$0" "$@"' "${LAUNCH:-recipes/launch}/two-nodes.sh" "$@" || status=$?
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
