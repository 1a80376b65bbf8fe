#!/bin/bash
# The first minutes on a machine with a GPU, about 6: does the CUDA backend work at all? Never run on one.
# `bash benchmarks/gpu_wheels.sh` comes before it, elsewhere. Results go to the folder $OUT. `--fake` runs without a GPU.
exec 2>&1
cd "$(dirname "$0")/.." || exit 1
fake=$1
OUT=${OUT:-gpu-results}
SITE=${SITE:-$(mktemp -d)}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$SITE PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl || exit 1

machine() {
  date; uname -r; nproc; free -g | head -2; df -h /dev/shm /tmp; mount | grep shm; ulimit -l
  lscpu | grep -i "numa\|model name"; cat /sys/kernel/mm/transparent_hugepage/shmem_enabled
  "$PYTHON" -m pip list 2>/dev/null | grep -i "^torch \|triton\|cuda-\|numpy \|pytest\|hypothesis\|xxhash\|msgspec\|pyzmq\|blake3\|kvdepot"
  if [ -z "$fake" ]; then
    ls /dev/nvidia*
    nvidia-smi --query-gpu=name,driver_version,persistence_mode,mig.mode.current,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,memory.used --format=csv
    # Memory may be small at first and /dev/shm have half of that: give the pools room, or each step fails for want of it.
    mount -o remount,size=48G /dev/shm || mount -t tmpfs -o size=48G,mode=1777 tmpfs /dev/shm
    df -h /dev/shm
  fi
  echo "why unavailable: $("$PYTHON" -c 'from kvdepot_cuda.availability import why_unavailable; print(why_unavailable())')"
}

# A client that stays: without one, and without persistence mode, each process would initialise the GPU anew.
holder() {
  exec "$PYTHON" -c "
import time
started = time.time()
from kvdepot_cuda.nvidia import CudaDriver
driver = CudaDriver(0)
print(driver.description, driver.uuid, driver.capability, 'batches', driver.has_batch_copy, round(time.time() - started, 2), 's', flush=True)
time.sleep(3600)"
}

kernel() {
  timeout 60 "$PYTHON" -c "
import time
started = time.time()
from kvdepot_cuda.gather import compile_gather
image = compile_gather(90)
print('kernel', len(image.image), image.name, image.num_threads, image.shared_bytes, image.num_hidden, round(time.time() - started, 1), 's')"
}

machine | tee "$OUT/machine.txt"
if [ -z "$fake" ]; then
  holder >> "$OUT/machine.txt" & HOLDER=$!
  trap 'kill $HOLDER' EXIT
  sleep 8
  tail -3 "$OUT/machine.txt"
fi
kernel | tee -a "$OUT/machine.txt"
timeout 320 "$PYTHON" benchmarks/gpu_probe.py $fake --out "$OUT" --seconds 310 --only small_ipc,allocators,captures,order,stress,killed
timeout 170 "$PYTHON" benchmarks/cuda_gpu.py $fake --out "$OUT" --seconds 160 --only environment,raw_ipc,patterned
[ -z "$fake" ] && nvidia-smi | tail -15
cat "$OUT/gpu_probe.md" "$OUT/cuda_gpu.md"
dmesg 2>/dev/null | grep -i "xid\|nvrm" | tail -5
true
