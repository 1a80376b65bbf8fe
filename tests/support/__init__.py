"""Helpers that tests share. `tests/` is on the path: pytest adds it, and for children `tests/conftest.py` does."""
