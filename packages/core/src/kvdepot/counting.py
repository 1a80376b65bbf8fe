"""Counters: each is declared beside the code that counts it, with the sentence that operators read.

    _LOOKUPS: Final = depot_counter("lookups", "Lookups by schedulers")
    ...
    self._counters[_LOOKUPS] += 1

`/metrics` exports all that are declared, from the start and at 0, so that a rate sees the first event. A name that is
not declared cannot be counted: pyright refuses a plain string.
"""

from typing import TYPE_CHECKING, Final, NewType

CounterName = NewType("CounterName", str)


class CounterGroup:
    """The counters that one exporter shows: a call declares one."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # what each counts, by name

    def __call__(self, name: str, text: str) -> CounterName:
        """Declare a counter. `text` is its help in `/metrics`, without a full stop.

        Raises:
            ValueError: the name is declared with another text.
        """
        declared = CounterName(name)
        if self.texts.setdefault(declared, text) != text:
            raise ValueError(f"counter {name} is declared twice: {self.texts[declared]!r} and {text!r}")
        return declared


class Counts(dict[str, int]):
    """Counts by name, 0 if nothing was counted."""

    def __missing__(self, name: str) -> int:
        return 0

    if TYPE_CHECKING:  # at run time a dict's own, as each lookup counts five times

        def __setitem__(self, name: CounterName, amount: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            ...


depot_counter: Final = CounterGroup()  # `kvdepot_NAME_total`
tier_counter: Final = CounterGroup()  # `kvdepot_tier_NAME_total`, by tier
