#!/bin/bash
# Rehearses gpu_first.sh in the layout of a machine with a GPU: Python 3.12 with numpy and cuda-bindings of CUDA 13.0, all
# else from .whl through PYTHONPATH. It runs over the fake driver and collects the suites for a device.
# PYTHON312 names that Python if uv does not find it, TRITON the version of Triton to install, if any.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bash benchmarks/gpu_wheels.sh
uv venv --quiet --seed --python "${PYTHON312:-3.12}" "$work/venv"
VIRTUAL_ENV=$work/venv uv pip install --quiet numpy "cuda-bindings==13.0.3" ${TRITON:+"triton==$TRITON"}
export PYTHON=$work/venv/bin/python SITE=$work/site OUT=$work/out
bash benchmarks/gpu_first.sh --fake
PYTHONPATH=$SITE PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$PYTHON" -m pytest -q -p no:cacheprovider tests/cuda/test_on_device.py | tail -3
grep -q '| patterned | ok |' "$OUT/cuda_gpu.md"
grep -q '| order | skipped |' "$OUT/gpu_probe.md"
echo "rehearsal: ok"
