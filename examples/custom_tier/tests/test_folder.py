"""Runs the conformance suite on the example's tier, and the tier in a real depot."""

import re
from contextlib import closing
from pathlib import Path

import pytest
from kvdepot_folder import FolderTier

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.lab.bench import IndexFiller, filler_spec, prompt_key
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.tier import Damage, TierSuite
from kvdepot.tiers import TierPool

README = Path(__file__).parents[1] / "README.md"


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


def test_started_as_the_readme_says_a_depot_finds_what_another_stored(tmp_path: Path) -> None:
    (flags,) = re.findall(r"^    kvdepot serve (.*)$", README.read_text(), re.MULTILINE)
    started = flags.replace("/var/cache/entries", str(tmp_path)).split()
    prompt = prompt_key(1, 4)
    with DepotProcess(*started) as depot, closing(IndexFiller(depot.url)) as worker:
        (tier,) = depot.status().tiers
        assert (tier.name, tier.state) == (f"folder://{tmp_path}", "closed")
        worker.store(prompt)
        wait_until(lambda: depot.status().tiers[0].num_entries == 4)
    with (
        DepotProcess(*started) as other,
        closing(IndexFiller(other.url)),  # the depot learns the size of an entry from it
        SchedulerClient(filler_spec(64), "filler", url=other.url, deadline_seconds=30.0) as scheduler,
    ):
        scheduler.wait_until_connected(30.0)
        lease = scheduler.lookup("a request", prompt)
        assert (lease.num_chunks, lease.num_promoted) == (4, 4)
