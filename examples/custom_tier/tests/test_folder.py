"""Runs the conformance suite on the example's tier, and the tier in a real depot."""

from pathlib import Path

import pytest
from kvdepot_folder import FolderTier

from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.tier import Damage, TierSuite
from kvdepot.tiers import TierPool


class TestFolderTier(TierSuite):
    """Inherits all tests."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "entries"

    def open_tier(self, pool: TierPool) -> FolderTier:
        return FolderTier(pool, self.path)

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        file = self.path / key.hex()
        data = bytearray(file.read_bytes())
        if how is Damage.FLIPPED:
            data[len(data) // 3] ^= 1
        elif how is Damage.TRUNCATED:
            del data[-7:]
        else:
            data[:] = (self.path / other.hex()).read_bytes()
        file.write_bytes(data)


def test_a_depot_opens_it_by_its_url(tmp_path: Path) -> None:
    with DepotProcess("--tier", f"folder://{tmp_path}") as depot:
        (tier,) = depot.status().tiers
        assert (tier.name, tier.state) == (f"folder://{tmp_path}", "closed")
