#!/usr/bin/env bash
# Trains on every GPU of this machine, or in RANKS processes:
#   bash recipes/launch/one-node.sh ppo config.yaml --output runs/ppo
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240} # seconds to save a checkpoint
exec torchrun --standalone --nproc-per-node "${RANKS:-gpu}" -m heedful "$@"
