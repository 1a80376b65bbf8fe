"""Reads arguments of the commands beside the tests."""

from argparse import ArgumentTypeError

from kvdepot.operate.commandline import number_argument


def seconds_argument(text: str) -> float:
    """Parse a number of seconds above 0. With any other, a run would try nothing and pass."""
    seconds = number_argument(text)
    if seconds <= 0:
        raise ArgumentTypeError(f"{text} seconds: give a number above 0")
    return seconds
