#!/usr/bin/env bash
# Installs the wheels that wheels.sh made, if there are any and this Python is 3.12, beside its torch, and runs day.py with it.
set -euo pipefail
started=$(date +%s.%N)
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
wheels=$root/runs/gpu_day/wheels
work=${TMPDIR:-/tmp}/gpu_day
python=${PYTHON:-python3}
if [ -d "$wheels" ] && [ ! -d "$work/site" ] && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
  install() { "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/$1" "${@:2}"; }
  install trl "$wheels"/trl/*.whl
  install site "$wheels"/*.whl
fi
# The tree's own code comes first: a mend needs no new wheel.
export PYTHONPATH=$root/src:$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$here/day.py" --started "$started" "$@"
