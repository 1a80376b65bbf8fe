"""An entry of 5,000 bytes as the first release sealed it. Every tier must read it, and write the same bytes."""

from kvdepot.testing.tier_traffic import make_key

KEPT_KEY = make_key(7, "a tenant")
KEPT_TRAILER = bytes.fromhex(
    "4b564445504f54310100000000000000881300000000000086d97ba414bf826f7fcccec0361f0442616f187d46f5724f328844808b151a41"
    "000000000000000000000000000000000000000000000000000000000000000721bd4917b9de4cadd7ccd05802bcc6d0bd8ab314ecf2258f"
    "b958a4eac2802ac6"
)
