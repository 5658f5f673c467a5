#!/usr/bin/env bash
# Trains on every GPU of two machines that reach each other and see the same folders. On both, at about the same time:
#   HEAD=first.example NODE=0 bash recipes/launch/two-nodes.sh ppo config.yaml --output /shared/runs/ppo   # on first.example
#   HEAD=first.example NODE=1 bash recipes/launch/two-nodes.sh ppo config.yaml --output /shared/runs/ppo   # on the other
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240} # seconds to save a checkpoint
exec torchrun --nnodes "${NODES:-2}" --node-rank "$NODE" --master-addr "$HEAD" --master-port "${PORT:-29500}" \
  --nproc-per-node "${RANKS:-gpu}" -m heedful "$@"
