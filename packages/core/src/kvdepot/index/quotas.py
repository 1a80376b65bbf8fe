"""Shares of the pool: quotas in bytes, and the shares that must make room.

A quota guarantees a tenant that many bytes. A tenant may borrow idle space on top. When a store needs room, shares
above their quota make it, the one with the largest relative excess first. If no share is above its quota, the storing
share evicts its own chunks. Therefore no tenant can evict chunks that another tenant keeps within its quota, and two
tenants that both exceed their quotas evict only their own chunks. Tenants without a quota share the rest.

Leases and pins do not weaken the guarantee: those of a share above its quota yield to a share within its own
(`Evictor.make_room`). Unfinished entries cannot yield, because a living process may be writing to them. So a share can
have at most its quota of those. Tenants without a quota can have a sixteenth of the pool, even if the quotas leave
less.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Final

from kvdepot.config import format_size
from kvdepot.errors import ConfigError

MAXIMUM_QUOTAS: Final = 64  # each eviction examines all shares
_LEAST_WRITING: Final = 1 / 16  # of the pool, for unfinished entries of tenants without a quota


class QuotaTable:
    """Shares of the pool: number 0 for tenants without a quota, then one per quota.

    Bytes are counted by share and by tenant.

    Args:
        capacity_bytes: the size of the pool.
        quotas: the quotas in bytes by tenant.

    Raises:
        ConfigError: there are too many quotas, or their sum exceeds the pool.
    """

    def __init__(self, capacity_bytes: int, quotas: Mapping[str, int] | None = None) -> None:
        quotas = quotas or {}
        if len(quotas) > MAXIMUM_QUOTAS:
            raise ConfigError(f"{len(quotas)} quotas: a depot has at most {MAXIMUM_QUOTAS}")
        rest = capacity_bytes - sum(quotas.values())
        if rest < 0 or any(quota <= 0 for quota in quotas.values()):
            raise ConfigError(
                f"quotas of {format_size(sum(quotas.values()))} for a pool of {format_size(capacity_bytes)}: each must"
                " be above 0, and their sum must fit into the pool"
            )
        self._share_by_name = {name: number for number, name in enumerate(quotas, start=1)}
        self.quota_bytes = [rest, *quotas.values()]
        self.used_bytes = [0] * len(self.quota_bytes)
        self.writing_bytes = [0] * len(self.quota_bytes)  # of unfinished entries; included in `used_bytes`
        self._least_writing_bytes = int(capacity_bytes * _LEAST_WRITING)
        self._names = [""]  # the names of tenants
        self._shares = [self._share_by_name.get("", 0)]  # by tenant
        self.tenant_bytes = [0]  # by tenant
        self.label_bytes: list[int] = []  # by label
        self._tenants = {"": 0}  # by name
        self._tenant_of: list[int] = []  # by label
        self._without: dict[str, int] = {}  # shares of tenants whose quota was removed

    @property
    def num_shares(self) -> int:
        """The number of shares."""
        return len(self.quota_bytes)

    def add_label(self, number: int, tenant: str) -> None:
        """Add the next label, with its tenant. Labels are numbered from 0 on."""
        self._tenant_of.extend([0] * (number + 1 - len(self._tenant_of)))
        self.label_bytes.extend([0] * (number + 1 - len(self.label_bytes)))
        if tenant not in self._tenants:
            self._tenants[tenant] = len(self._names)
            self._names.append(tenant)
            self._shares.append(self._share_by_name.get(tenant, 0))
            self.tenant_bytes.append(0)
        self._tenant_of[number] = self._tenants[tenant]

    def account(self, label: int, share: int, num_bytes: int) -> None:
        """Add bytes of a label to a share. Negative bytes are subtracted."""
        if label < len(self._tenant_of):
            self.tenant_bytes[self._tenant_of[label]] += num_bytes
            self.label_bytes[label] += num_bytes
        else:
            self.tenant_bytes[0] += num_bytes
        self.used_bytes[share] += num_bytes

    def forget_usage(self) -> None:
        """Set all usage to zero."""
        self.used_bytes[:] = [0] * self.num_shares
        self.writing_bytes[:] = [0] * self.num_shares
        self.tenant_bytes[:] = [0] * len(self.tenant_bytes)
        self.label_bytes[:] = [0] * len(self.label_bytes)

    def move(self, num_bytes: int, source: int, target: int) -> None:
        """Move bytes to another share."""
        self.used_bytes[source] -= num_bytes
        self.used_bytes[target] += num_bytes

    def _excess_of(self, share: int) -> float:
        """Return the used bytes of a share per byte of its quota, 0.0 if it is within its quota."""
        used, quota = self.used_bytes[share], self.quota_bytes[share]
        return used / max(1, quota) if used > quota else 0.0

    def excess_bytes(self, share: int) -> int:
        """Return how many bytes a share uses above its quota."""
        return self.used_bytes[share] - self.quota_bytes[share]

    def writable_bytes(self, share: int) -> int:
        """Return how many bytes a share may add to its unfinished entries. Only quotas limit them."""
        if len(self.quota_bytes) == 1:
            return sys.maxsize
        # Unfinished entries cannot yield: those beyond a small quota would take what other quotas guarantee.
        most = self.quota_bytes[share] if share else max(self.quota_bytes[0], self._least_writing_bytes)
        return most - self.writing_bytes[share]

    def is_owed(self, share: int, num_bytes: int) -> bool:
        """Return whether a share stays within its quota with these bytes, so that others must make room for them."""
        return self.num_shares > 1 and self.used_bytes[share] + num_bytes <= self.quota_bytes[share]

    def is_above(self, share: int) -> bool:
        """Return whether a share uses more than its quota."""
        return self.used_bytes[share] > self.quota_bytes[share]

    def set_quota(self, name: str, num_bytes: int) -> None:
        """Set a tenant's quota. New chunks count against it at once; the caller moves older ones.

        Raises:
            ConfigError: the quotas would exceed the pool, or there are too many. Nothing has changed.
        """
        share = self._share_by_name.get(name) or self._without.get(name)
        more = num_bytes - (self.quota_bytes[share] if share else 0)
        if num_bytes <= 0 or more > self.quota_bytes[0]:
            raise ConfigError(
                f"a quota of {format_size(num_bytes)} for {name!r}: the quotas of others leave"
                f" {format_size(num_bytes - more + self.quota_bytes[0])} of the pool"
            )
        if share is None:
            share = self._new_share(name)
        self._without.pop(name, None)
        self.quota_bytes[share] = num_bytes
        self.quota_bytes[0] -= more
        self._share_by_name[name] = share
        self._assign(name, share)

    def _new_share(self, name: str) -> int:
        """Return a share without a quota and without bytes.

        Raises:
            ConfigError: there are too many shares.
        """
        for other, share in self._without.items():
            if not (self.quota_bytes[share] or self.used_bytes[share] or self.writing_bytes[share]):
                del self._without[other]
                return share
        if self.num_shares > MAXIMUM_QUOTAS:
            raise ConfigError(f"{MAXIMUM_QUOTAS} tenants have a quota: remove one before you add {name!r}")
        for column in (self.quota_bytes, self.used_bytes, self.writing_bytes):
            column.append(0)
        return self.num_shares - 1

    def end_quota(self, name: str) -> bool:
        """Remove a tenant's quota for its new chunks. Return False if it has none.

        The caller moves its older chunks, and then releases the quota with `forget_quota`.
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

    def first_tenants(self, count: int) -> Iterator[tuple[str, int]]:
        """Return the names and used bytes of the first `count` tenants."""
        return zip(self._names[1 : count + 1], self.tenant_bytes[1 : count + 1], strict=True)

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """Return share, quota and used bytes of each tenant with a quota."""
        return {
            name: (share, self.quota_bytes[share], self.used_bytes[share])
            for name, share in self._share_by_name.items()
        }

    def forget_quota(self, name: str) -> None:
        """Release the quota of a tenant after `end_quota`."""
        share = self._without.get(name)
        if share is not None:
            self.quota_bytes[0] += self.quota_bytes[share]
            self.quota_bytes[share] = 0

    def _assign(self, name: str, share: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None:
            self._shares[tenant] = share

    def tenant_of(self, label: int) -> int:
        """Return the number of a label's tenant. Tenants are numbered from 0 in order of their appearance."""
        return self._tenant_of[label] if label < len(self._tenant_of) else 0

    def share_of(self, label: int) -> int:
        """Return the share of a label's tenant."""
        return self._shares[self._tenant_of[label]] if label < len(self._tenant_of) else 0

    def victims(self, share: int) -> Iterator[int]:
        """Return the shares that must make room for `share`, in order. Call this again after each eviction."""
        if self.num_shares > 1:
            yield from self.above()
            if self._excess_of(share):
                return
        yield share

    def above(self) -> list[int]:
        """Return the shares above their quota, largest relative excess first. Call this again after each change."""
        excess = [(-self._excess_of(share), share) for share in range(self.num_shares) if self.is_above(share)]
        return [share for _, share in sorted(excess)]
