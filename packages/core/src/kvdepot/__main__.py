"""`python -m kvdepot`."""

from kvdepot.cli import main

main()
