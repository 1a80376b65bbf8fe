"""Which tenant makes room: quotas of the pool's bytes.

A quota is what a tenant can keep against all others; space that nobody else needs may be borrowed on top. When room is
needed, those above their quota give it, the one that is above it most first; if nobody is, whoever asks makes its own
room. So no tenant can evict what another keeps within its quota, and two that both want more than theirs evict only
themselves. Tenants without a quota share what the quotas leave.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from kvdepot.errors import ConfigError

MAXIMUM_QUOTAS: Final = 1024  # that a depot has had at the same time or one after the other


class QuotaTable:
    """Shares of the pool: number 0 for tenants without a quota, then one for each quota. Bytes are counted by share.

    Args:
        capacity_bytes: of the pool.
        quotas: bytes by tenant.

    Raises:
        ConfigError: the quotas are more than the pool.
    """

    def __init__(self, capacity_bytes: int, quotas: Mapping[str, int] | None = None) -> None:
        quotas = quotas or {}
        rest = capacity_bytes - sum(quotas.values())
        if rest < 0 or any(quota <= 0 for quota in quotas.values()):
            raise ConfigError(
                f"quotas of {sum(quotas.values())} bytes in a pool of {capacity_bytes}: at most all of it"
            )
        self._share_by_name = {name: number for number, name in enumerate(quotas, start=1)}
        self.quota_bytes = [rest, *quotas.values()]
        self.used_bytes = [0] * len(self.quota_bytes)
        self._share_of: list[int] = []  # by tenant
        self._names: list[str] = []  # by tenant
        self._without: dict[str, int] = {}  # shares of tenants that have no quota any more

    @property
    def num_shares(self) -> int:
        """How many there are."""
        return len(self.quota_bytes)

    def add_tenant(self, number: int, name: str) -> None:
        """Learn a tenant's name; numbers come one after the other."""
        while len(self._share_of) <= number:
            self._share_of.append(0)
            self._names.append("")
        self._names[number] = name
        self._share_of[number] = self._share_by_name.get(name, 0)

    def set_quota(self, name: str, num_bytes: int) -> None:
        """Give a tenant a quota, or change it. New chunks count against it at once; the caller moves the others.

        Raises:
            ConfigError: the quotas would be more than the pool, or there are too many; nothing has changed.
        """
        share = self._share_by_name.get(name) or self._without.get(name)
        more = num_bytes - (self.quota_bytes[share] if share else 0)
        if num_bytes <= 0 or more > self.quota_bytes[0]:
            raise ConfigError(
                f"a quota of {num_bytes} bytes for {name!r}: the quotas of others leave"
                f" {num_bytes - more + self.quota_bytes[0]} of the pool"
            )
        if share is None:
            if self.num_shares > MAXIMUM_QUOTAS:
                raise ConfigError(f"more than {MAXIMUM_QUOTAS} tenants with a quota: {name!r} is one too many")
            share = self.num_shares
            self.quota_bytes.append(0)
            self.used_bytes.append(0)
        self._without.pop(name, None)
        self.quota_bytes[share] = num_bytes
        self.quota_bytes[0] -= more
        self._assign(name, share)

    def end_quota(self, name: str) -> bool:
        """Let a tenant share what quotas leave, from the next chunk on; False if it does so already.

        Its quota is given back by `forget_quota`, once the caller has moved its chunks.
        """
        share = self._share_by_name.pop(name, None)
        if share is None:
            return False
        self._without[name] = share
        self._assign(name, 0)
        return True

    def by_name(self) -> dict[str, int]:
        """Return the quotas in bytes by tenant."""
        return {name: self.quota_bytes[share] for name, share in self._share_by_name.items()}

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return quota and used bytes by tenant."""
        return {name: (self.quota_bytes[share], self.used_bytes[share]) for name, share in self._share_by_name.items()}

    def forget_quota(self, name: str) -> None:
        """Give back the quota of a tenant whose quota has ended."""
        share = self._without.get(name)
        if share is not None:
            self.quota_bytes[0] += self.quota_bytes[share]
            self.quota_bytes[share] = 0

    def _assign(self, name: str, share: int) -> None:
        if share:
            self._share_by_name[name] = share
        self._share_of = [
            share if other == name else old for other, old in zip(self._names, self._share_of, strict=True)
        ]

    def share_of(self, tenant: int) -> int:
        """Return the share of a tenant."""
        return self._share_of[tenant] if tenant < len(self._share_of) else 0

    def victims(self, share: int) -> Iterator[int]:
        """Return the shares that make room for `share`, in order; ask again after each chunk that left."""
        used, quota = self.used_bytes, self.quota_bytes
        if len(quota) > 1:
            above = [number for number in range(len(quota)) if used[number] > quota[number]]
            above.sort(key=lambda number: used[number] / max(1, quota[number]), reverse=True)
            yield from above
            if share in above:
                return
        yield share
