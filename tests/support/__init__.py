"""What tests share. `tests/` is on the path: pytest puts it there, and `tests/conftest.py` for children."""
