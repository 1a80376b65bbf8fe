"""A mover without a device, `python -m support.mover_child`. The name of its worker's device says how it behaves.

`quick` writes the number of the copy into the first byte of each extent. `hangs` never answers a copy, `dies` exits at
the first, `babbles` answers nonsense, `refuses` refuses every copy, `late` is not ready before its socket closes.
"""

import os
import sys

from kvdepot.movers.child import CopyNow, run_mover
from kvdepot.movers.protocol import Copy, CopyRefused, MoverError, Setup
from kvdepot.pool.files import PoolMemory
from kvdepot.wire.messages import EXTENT


def open_device(setup: Setup, pool: PoolMemory) -> CopyNow:
    offer = setup.registration.offer
    assert offer is not None
    if offer.device == "final":
        raise MoverError("there is no such device", is_final=True)
    if offer.device == "late":
        os.read(int(sys.argv[3]), 1)
        os._exit(0)

    def copy(request: Copy) -> bool:
        match offer.device:
            case "hangs":
                os.read(os.pipe()[0], 1)
            case "dies":
                os._exit(3)
            case "babbles":
                os.write(int(sys.argv[3]), b"\3\0\0\0abc")
            case "refuses":
                raise CopyRefused("blocks of somebody else")
            case _:
                for *_, offset, _ in EXTENT.iter_unpack(request.extents):
                    pool.pool[offset] = request.number
        return offer.device == "settled"

    return copy


if __name__ == "__main__":
    run_mover(sys.argv[1:], open_device, float(os.environ.get("MOVER_TRACE_SECONDS", "20")))
