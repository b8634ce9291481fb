#!/usr/bin/env bash
# Runs the tests and the benchmark for a CUDA device without a network. GPU_PYTHON is a Python that has torch. Packages
# that it lacks are installed from the wheels in .gpu-wheels, which `make gpu-wheels` has put there. Results go to $OUT
# (build/gpu). It ends within eight minutes. Without a device the CPU takes its place, to show that the program works.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${GPU_PYTHON:-python3}
out=${OUT:-build/gpu}
packages=$PWD/build/gpu-packages
mkdir -p "$out" "$packages"
export PYTHONPATH="$PWD/src:$PWD:$packages"

if ! "$python" -c "import msgspec, isal, megatron.core" 2>/dev/null; then
  # This installs one by one. It goes on if the machine has a package already, or if no wheel fits.
  for name in msgspec isal megatron-core hypothesis pytest pytest-timeout safetensors; do
    "$python" -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null && continue
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links .gpu-wheels \
      --target "$packages" --no-deps "$name" || echo "no wheel of $name in .gpu-wheels fits"
  done
fi
"$python" -c "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'NO GPU')"

failed=0
timeout --kill-after=10 130 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider --timeout 60 \
  -o addopts="--import-mode=importlib" -o filterwarnings=default --junitxml "$out/tests.xml" 2>&1 |
  tee "$out/tests.txt" || failed=1
timeout --kill-after=10 340 "$python" -m benchmarks.gpu --json "$out/gpu.json" "$@" 2>&1 | tee "$out/gpu.txt" || failed=1
exit "$failed"
