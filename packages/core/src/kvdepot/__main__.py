"""`python -m kvdepot`."""

from kvdepot.operate.cli import main

main()
