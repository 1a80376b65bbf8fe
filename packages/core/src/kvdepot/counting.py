"""Counters, each declared beside the code that counts it, with the description for operators.

    _LOOKUPS: Final = depot_counter("lookups", "Lookups by schedulers")
    ...
    self._counters[_LOOKUPS] += 1

`/metrics` exports all declared counters, from the start and at 0, so that rates include the first event. Undeclared
names cannot be counted, because pyright refuses plain strings.
"""

from typing import TYPE_CHECKING, Final, NewType

CounterName = NewType("CounterName", str)


class CounterGroup:
    """The counters of one exporter. Calling it declares a counter."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # descriptions by name

    def __call__(self, name: str, text: str) -> CounterName:
        """Declare a counter. `text` is its description in `/metrics`, without a full stop.

        Raises:
            ValueError: the name is declared already with another text.
        """
        declared = CounterName(name)
        if self.texts.setdefault(declared, text) != text:
            raise ValueError(f"counter {name} is declared twice: {self.texts[declared]!r} and {text!r}")
        return declared


class Counts(dict[str, int]):
    """Counts by name, 0 by default."""

    def __missing__(self, name: str) -> int:
        return 0

    if TYPE_CHECKING:  # at run time, dict's methods are used, as each lookup counts five times

        def __setitem__(self, name: CounterName, amount: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            ...


depot_counter: Final = CounterGroup()  # `kvdepot_NAME_total`
tier_counter: Final = CounterGroup()  # `kvdepot_tier_NAME_total`, by tier
engine_counter: Final = CounterGroup()  # `vllm:kvdepot_NAME_total`
