#!/usr/bin/env bash
# Shows that a prompt outlives its engine: serve.sh MODEL [further flags of sglang.launch_server]
#
# Starts a depot and an engine, asks once, kills the engine, starts another one and asks the same again. The
# cached tokens of the second answer come from the depot, as the new engine has computed nothing yet. Fails if there are
# none. Prints them, and the time to the first token of both. The engine's log is a file and stays if this fails.
#
# PORT: the engine's. POOL_SIZE: the depot's.
set -euo pipefail
model=$1
shift
port=${PORT:-30000}
directory=$(mktemp -d)
log=$(mktemp)
engine=
depot=
trap 'kill $engine $depot 2>/dev/null; wait; rm -rf "$directory"' EXIT

kvdepot serve --dir "$directory" --pool-size "${POOL_SIZE:-1GiB}" --ephemeral &
depot=$!

start_engine() {
  echo "starting an engine, log: $log"
  python -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" --page-size 64 \
    --enable-cache-report --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic \
    --unified-cache-external-linker-config '{
      "linker": "KVDepotLinker", "linker_module_path": "kvdepot_sglang.linker",
      "linker_extra_config": {"url": "'"$directory"'"}
    }' "$@" >>"$log" 2>&1 &
  engine=$!
  for _ in $(seq 300); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && return
    kill -0 "$engine" 2>/dev/null || break
    sleep 1
  done
  grep --max-count=1 -E '^[A-Za-z.]*Error: ' "$log" >&2 || tail -1 "$log" >&2
  echo "the engine ended, or did not answer for five minutes: above is its first error, and its log is $log" >&2
  exit 1
}

tokens=$(seq --separator , 10 709)
ask() {
  curl --silent --fail "http://127.0.0.1:$port/generate" --header 'Content-Type: application/json' \
    --data '{"input_ids": ['"$tokens"'], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}' \
    --write-out '\n%{time_total}'
}

# The number of a field of an answer, 0 without it.
number_of() { grep --only-matching "\"$1\": *[0-9]*" <<<"$2" | grep --only-matching '[0-9]*$' || echo 0; }
report() { # the time is that of one token, so the time to the first one
  echo "$1 engine: $(number_of cached_tokens "$2") of $(number_of prompt_tokens "$2") prompt tokens came from the depot," \
    "first token after ${2##*$'\n'} s"
}

start_engine "$@"
first=$(ask)
kill "$engine" && wait "$engine" || true
start_engine "$@"
second=$(ask)
kvdepot status --dir "$directory"
report "first" "$first"
report "second" "$second"
[[ $(number_of cached_tokens "$second") != 0 ]] || { echo "nothing came from the depot; log: $log" >&2; exit 1; }
echo "It works: the second engine did not compute what the first one had."
rm "$log"
