"""The engine's half: names the prefixes of sessions, and reports their ends."""

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.features.sessions.messages import Hint
from kvdepot.keys import KeyRun


def hint(
    client: SchedulerClient,
    key: KeyRun,
    *,
    session_ended: bool = False,
    session: str = "",
    retain_seconds: float = 0.0,
) -> None:
    """Advise the depot how long to keep the chunks of `key` (a run from chunk 0 on): see `Hint`.

    A depot that is away does not get it.
    """
    if key.digests:
        client.post(lambda context: [Hint(context, key.tenant, key.digests, session_ended, session, retain_seconds)])
