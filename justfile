# What one does here; `uv run pytest` needs no justfile.

# Run every environment, two at a time: 15 to 23 minutes on two cores.
test *ARGS:
    uv run tox run-parallel {{ARGS}}

# Check style, types, layers, docs and manifests.
lint:
    uv run tox run -e lint

# Format, and mend what ruff can mend.
fmt:
    uv run --group lint ruff check --fix
    uv run --group lint ruff format

# Build the documentation into site/.
docs:
    uv run --group docs zensical build --strict

# Build the wheels of all packages into dist/.
wheels:
    uv build --all-packages --wheel --out-dir dist --clear

# Make a release: its commit, its tag, and its files in dist/. With --dry-run, only the files.
release VERSION *ARGS:
    python3 release.py {{VERSION}} {{ARGS}}

# Measure copies, lookups and the server on this machine, as ratios within one run.
bench:
    uv run kvdepot bench transfer
    uv run kvdepot bench lookup
    uv run python benchmarks/depot/server.py
