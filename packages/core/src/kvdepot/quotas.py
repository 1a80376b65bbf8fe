"""Which tenant makes room: quotas of the pool's bytes.

A quota is what a tenant can keep against all others; space that nobody else needs may be borrowed on top. When room is
needed, those above their quota give it, the one that is above it most first; if nobody is, whoever asks makes its own
room. So no tenant can evict what another keeps within its quota, and two that both want more than theirs evict only
themselves. Tenants without a quota share what the quotas leave.
"""

from collections.abc import Iterator, Mapping

from kvdepot.errors import ConfigError


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

    @property
    def num_shares(self) -> int:
        """How many there are."""
        return len(self.quota_bytes)

    def add_tenant(self, number: int, name: str) -> None:
        """Learn a tenant's name; numbers come one after the other."""
        while len(self._share_of) <= number:
            self._share_of.append(0)
        self._share_of[number] = self._share_by_name.get(name, 0)

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
