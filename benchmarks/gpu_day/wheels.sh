#!/usr/bin/env bash
# Fetches what a machine with Python 3.12 and torch lacks, into runs/gpu_day/wheels, and prints its size; run.sh installs it there.
# Not among it: torch, numpy, pyarrow and, for TRL, pandas, which are large; the machine's own do.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=$root/runs/gpu_day/wheels
python=${PYTHON:-python3}
rm -rf "$wheels"
mkdir -p "$wheels/trl"
fetch() {
  "$python" -m pip download -q --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -c "$root/constraints.txt" -d "$@"
}
# What heedful needs and what that needs, without what torch brings; versions that are not here are those of constraints.txt.
fetch "$wheels" transformers tokenizers safetensors huggingface_hub peft accelerate bitsandbytes==0.50.2 \
  jaxtyping wadler-lindig==0.1.8 lazy-loader PyYAML rich markdown-it-py mdurl==0.1.2 Pygments==2.21.0 \
  httpx2 httpcore2==2.16.2 anyio==4.16.0 h11==0.16.0 idna==3.20 truststore==0.10.5 tenacity filelock regex==2026.11.19 \
  tqdm==4.70.1 packaging==26.4 psutil==7.2.2 click==8.5.1 \
  datasets dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 tensorboard protobuf==7.36.2 absl-py==2.5.1
fetch "$wheels/trl" trl==1.12.0
"$python" -m pip wheel -q --no-deps -w "$wheels" "$root"
# bitsandbytes has a library for each CUDA; the machine's torch is made for 13.0.
"$python" - "$wheels"/bitsandbytes-*.whl <<'END'
import pathlib, sys, zipfile

whole = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(whole) as old, zipfile.ZipFile(whole.with_suffix(".less"), "w", zipfile.ZIP_DEFLATED) as new:
    for name in old.namelist():
        if not name.endswith(".so") or name.endswith(("_cuda130.so", "_cpu.so")):
            new.writestr(name, old.read(name))
whole.with_suffix(".less").rename(whole)
END
du -sm "$wheels" | cut -f1 | sed 's/$/ MiB of wheels/'
