"""The engine's counters. Each is declared beside the code that counts it; `stats` exports them all."""

from typing import Final

from kvdepot.counting import CounterGroup

engine_counter: Final = CounterGroup()  # `vllm:kvdepot_NAME_total`
