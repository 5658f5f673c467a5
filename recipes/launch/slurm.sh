#!/usr/bin/env bash
#SBATCH --job-name=heedful
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# One task per machine, which starts a rank per GPU:
#   sbatch recipes/launch/slurm.sh ppo config.yaml --output /shared/runs/ppo
# Five minutes before its time is over this script is asked to end. It passes that on, the run saves a checkpoint, and the job is
# queued again, where the same command goes on.
set -euo pipefail
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${names%%$'\n'*} NODES=$SLURM_NNODES PORT=$((20000 + SLURM_JOB_ID % 20000))
asked=0 status=0
trap 'asked=1; kill -TERM "$task"' TERM
# When one machine's task fails, the others' ranks end by themselves and may save: they have five minutes. srun takes over no
# number of processors from sbatch.
srun --kill-on-bad-exit=0 --wait=300 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  bash -c 'NODE=$SLURM_NODEID exec bash "$0" "$@"' "${LAUNCH:-recipes/launch}/two-nodes.sh" "$@" &
task=$!
wait "$task" || status=$?
while kill -0 "$task" 2>/dev/null; do # the trap has ended the first wait
  status=0
  wait "$task" || status=$?
done
if [ "$asked" -eq 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
