"""The engine's half: what it reports reaches a real depot."""

from kvdepot import SchedulerClient
from kvdepot.features.sessions import operations as o
from kvdepot.features.sessions.client import hint
from kvdepot.lab.processes import DepotProcess, wait_until
from support.peer import SPEC, prompt


def test_a_session_is_named_and_moved_without_waiting() -> None:
    with DepotProcess() as depot, SchedulerClient(SPEC, "engine", url=depot.url) as client:
        client.wait_until_connected(5.0)
        hint(client, prompt(3), session="agent", retain_seconds=60.0)
        hint(client, prompt(0), session_ended=True)
        wait_until(lambda: depot.status().num_agent_sessions == 1, 1.0)
        assert depot.status().counters["hints"] == 1, "an empty prompt has no prefix"
        client.post(lambda _context: [o.ForgetSession("nobody's"), o.ForgetSession("agent")])
        wait_until(lambda: depot.status().num_agent_sessions == 0, 1.0)
        assert client.lookup("r", prompt(3)).num_chunks == 0
