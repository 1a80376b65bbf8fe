#!/bin/bash
# Gathers the wheels that a machine with a GPU and without a network lacks into .whl, which git ignores.
# It is expected to have Python 3.12, torch, triton, numpy and cuda-bindings. For another Python: PYTHON_VERSION=3.13.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .whl
uv build --quiet --all-packages --wheel --out-dir .whl
rm -f .whl/.gitignore
platforms=()
for number in 39 35 34 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
  --dest .whl msgspec blake3 pyzmq xxhash pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers
du -sh .whl
