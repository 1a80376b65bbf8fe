"""`python -m kvdepot`."""

from kvdepot.ops.cli import main

main()
