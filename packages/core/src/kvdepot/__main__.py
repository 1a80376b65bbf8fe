"""The command `kvdepot`, and `python -m kvdepot`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C before it is loaded ends the process at once, without a traceback."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvdepot.operate import cli

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
