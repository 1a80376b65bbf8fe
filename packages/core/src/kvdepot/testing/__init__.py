"""Suites that every backend and tier inherits, and parts for tests of kvdepot.

- `kvdepot.testing.backend`: the conformance suite of transfer contexts.
- `kvdepot.testing.faults`: the fault suite, with engines that are killed and stopped (`kvdepot.testing.engine`).
- `kvdepot.lab.pattern`: bytes derived from a key, the oracle of every test that moves data.
- `kvdepot.lab.processes`: depots and engines as real processes that can be killed.
"""
