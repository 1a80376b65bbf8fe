"""An engine on a device, pretend or real, that obeys: `python -m support.staged.engine_child DEVICE URL INSTANCE`."""

import sys

import pytest

from kvdepot.testing.engine import obey
from support.staged.devices import DEVICES


def main() -> None:
    name, url, instance = sys.argv[1:]
    device = DEVICES[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        device.prepare(monkeypatch)
        obey(device.make_worker, url, instance)


if __name__ == "__main__":
    main()
