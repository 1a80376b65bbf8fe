#!/usr/bin/env bash
# vllm serve with a depot, asked the same twice with curl: serve.sh MODEL [further flags of vllm serve]
# The second answer says how many prompt tokens were reused ("cached_tokens").
set -euo pipefail
model=$1
shift
port=${PORT:-8000}
directory=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$directory"' EXIT

kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" &
${VLLM_SERVE:-vllm serve} "$model" --host 127.0.0.1 --port "$port" --enable-prompt-tokens-details "$@" --kv-transfer-config '{
  "kv_connector": "KVDepotConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"kvdepot.url": "'"$directory"'"}
}' &
engine=$!

for _ in $(seq 300); do
  curl --silent --fail "http://127.0.0.1:$port/health" && break
  kill -0 "$engine" || exit 1 # it ended: its log says why
  sleep 1
done

prompt=$(seq --format 't%g' --separator ' ' 1 700)
for _ in 1 2; do
  curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header 'Content-Type: application/json' \
    --data '{"model": "'"$model"'", "prompt": "'"$prompt"'", "max_tokens": 4, "temperature": 0}'
  echo
  curl --silent --fail --request POST "http://127.0.0.1:$port/reset_prefix_cache" || true # needs VLLM_SERVER_DEV_MODE=1
done
curl --silent --fail "http://127.0.0.1:$port/metrics" | grep '^vllm:kvdepot_'
kvdepot status --url "$directory"
