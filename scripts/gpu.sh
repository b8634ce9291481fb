#!/usr/bin/env bash
# The tests and the benchmark for a CUDA device, with whatever Python has torch there; no network. What that Python lacks
# is installed from wheels that `make gpu-wheels` has put into .gpu-wheels beforehand. Results go to $OUT (build/gpu).
# Ends within eight minutes. Without a device the CPU stands in, to show that all of it works.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${GPU_PYTHON:-python3}
out=${OUT:-build/gpu}
packages=$PWD/build/gpu-packages
mkdir -p "$out" "$packages"
export PYTHONPATH="$PWD/src:$PWD:$packages"

if ! "$python" -c "import msgspec, isal, zstandard, megatron.core" 2>/dev/null; then
  # One by one: what the machine has already, or no wheel fits, is no reason to stop here.
  for name in msgspec isal zstandard megatron-core hypothesis pytest pytest-timeout safetensors; do
    "$python" -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null && continue
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links .gpu-wheels \
      --target "$packages" --no-deps "$name" || echo "no wheel of $name in .gpu-wheels fits"
  done
fi
"$python" -c "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'NO GPU')"

failed=0
timeout --kill-after=10 240 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider \
  -o addopts="--import-mode=importlib" -o filterwarnings=default --junitxml "$out/tests.xml" 2>&1 |
  tee "$out/tests.txt" || failed=1
timeout --kill-after=10 220 "$python" -m benchmarks.gpu --json "$out/gpu.json" "$@" 2>&1 | tee "$out/gpu.txt" || failed=1
exit "$failed"
