"""Suites that every backend and tier inherits, and parts for tests of kvdepot.

- `kvdepot.testing.backend`: the conformance suite of transfer contexts.
- `kvdepot.testing.tier`: the conformance suite of tiers.
- `kvdepot.testing.faults`: the fault suite of backends: engines (`kvdepot.testing.engine`) are killed and stopped.
- `kvdepot.lab.pattern`: bytes derived from a key, the oracle of every test that moves data.
- `kvdepot.lab.processes`: depots and engines as real processes that can be killed.
"""
