"""The client side: lookups for schedulers, transfers for workers, and requests of operators' tools.

- `connection` keeps a `session` with the depot and reconnects. `channel`: one thread's requests over a session.
- `scheduler`: lookups and leases. `segments`: names for the pieces of a prompt, for blends. It loads numpy, so it is
  imported separately.
- `transfers`: a `TransferContext` made of a backend's copier. It uses `transfer_queue` (jobs and their threads),
  `exchange` (the protocol of one store or retrieve), `copy_route` (which process copies) and `verify` (checks after the
  copy).
- `operator`: one request without a session.
"""

from kvdepot.client.answers import BlendHit, BlendRun, Lease
from kvdepot.client.channel import Channel
from kvdepot.client.connection import Connection
from kvdepot.client.copy_route import CopyRoute
from kvdepot.client.operator import ask_depot
from kvdepot.client.scheduler import PendingBlendLookup, PendingLookup, SchedulerClient
from kvdepot.client.session import Session
from kvdepot.client.transfers import TransferOptions, WorkerTransfers

__all__ = [
    "BlendHit",
    "BlendRun",
    "Channel",
    "Connection",
    "CopyRoute",
    "Lease",
    "PendingBlendLookup",
    "PendingLookup",
    "SchedulerClient",
    "Session",
    "TransferOptions",
    "WorkerTransfers",
    "ask_depot",
]
