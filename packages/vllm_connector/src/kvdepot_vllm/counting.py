"""The engine's counters, each declared beside the code that counts it. `stats` exports all of them."""

from typing import Final

from kvdepot.counting import CounterGroup

engine_counter: Final = CounterGroup()  # `vllm:kvdepot_NAME_total`
