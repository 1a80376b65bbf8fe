"""The client side: lookups for schedulers, transfers for workers, and requests of operators' tools.

- `connection` keeps a `session` with the depot and reconnects. `session`: also one thread's requests over it.
- `scheduler`: lookups and leases.
- `transfers`: a `TransferContext` made of a backend's copier. It uses `transfer_queue` (jobs and their threads),
  `transfer_protocol` (one store or retrieve, and which process copies) and `verify` (checks after the copy).
- `operator`: one request without a session.
"""

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfer_protocol import CopyRoute
from kvdepot.client.transfers import TransferOptions, WorkerTransfers

__all__ = ["CopyRoute", "SchedulerClient", "TransferOptions", "WorkerTransfers"]
