"""HTTP as a target: bytes become a request directly to the application."""

import asyncio
from typing import Any, Final

from kvdepot.errors import ErrorCode, RemoteError
from kvdepot.operate import operations as o
from kvdepot.operate.http_app import create_app
from kvdepot.operate.serve import HttpSettings
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import OperatorRequest
from kvdepot.wire.status import DepotStatus, TenantStatus

_TOKEN: Final = "a token that nobody guesses"
_PATHS: Final = (
    b"/cache/clear /cache/warm /sessions/retain /sessions/prefetch /sessions/demote /sessions/forget /cache/find "
    b"/tenants/quota /drain /loglevel /config /openapi.json /healthz /readyz /status /metrics /tenants / "
    b"/tiers/add /tiers/remove"
).split()
_METHODS: Final = ("POST", "GET", "DELETE", "HEAD")
_ANSWERS: Final = {200, 400, 401, 404, 405, 409, 421}
_TENANT: Final = "somebody of whom others should not know"
_STATUS: Final = DepotStatus(tenants={_TENANT: TenantStatus(used_bytes=1)})


def call(data: bytes) -> None:
    """Make a call: byte 0 chooses the path, byte 1 method, token and host; the rest is a header's value and the body.

    The answer must have a documented status. Without the token, nothing may change and no tenant be named.
    """
    choice, flags, *_ = data[:2] + bytes(2)
    value, _, body = data[2:].partition(b"\0")
    authorization = f"Bearer {_TOKEN}".encode() if flags & 4 else value
    has_token = authorization == f"Bearer {_TOKEN}".encode()
    host = value if flags & 8 else b"127.0.0.1:9460"
    statuses: list[int] = []
    answer = bytearray()

    def ask(request: OperatorRequest, _seconds: float) -> Any:
        assert has_token or isinstance(request, m.Hello | o.Status), "asked without the token"
        try:
            frames.decode_request(bytes(frames.encode_frame(0, request)))
        except frames.FrameError as error:
            raise RemoteError(ErrorCode.MALFORMED, str(error)) from error
        if isinstance(request, o.Status):
            return o.StatusReply(1, _STATUS)
        if isinstance(request, o.Find):
            return o.Found(1, [])
        if isinstance(request, o.Configuration):
            return o.ConfigurationReply(1, {})
        return m.HelloReply(1, 1, "", 1) if isinstance(request, m.Hello) else m.Done(1, 0)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            answer.extend(message["body"])

    path = _PATHS[choice % len(_PATHS)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": _METHODS[flags & 3],
        "path": path.decode(),
        "raw_path": path,
        "query_string": value,
        "root_path": "",
        "scheme": "http",
        "headers": [(b"authorization", authorization), (b"host", host)],
        "client": None,
        "server": None,
    }
    app = create_app(ask, HttpSettings("127.0.0.1", 0, _TOKEN))
    asyncio.run(app(scope, receive, send))
    assert statuses, "no answer"
    assert statuses[0] in _ANSWERS, statuses
    assert has_token or _TENANT.encode() not in answer, "a tenant was named without the token"


def seeds() -> list[bytes]:
    """Return requests of every kind, right and wrong."""
    digest = b'"' + b"9f" * 32 + b'"'
    bodies = [
        b"",
        b"{}",
        b'{"tenant": "a", "model": "m"}',
        b'{"tenant": null}',
        b'{"colour": 1}',
        b"[[[[[[",
        b'{"tenant": "\\ud800"}',
        b'{"digests": [' + digest + b'], "tenant": "default"}',
        b'{"session": "agent", "retain_seconds": 60}',
        b'{"session": "agent", "at_once": true}',
        b'{"session": "", "retain_seconds": -1}',
        b'{"digests": ["zz"]}',
        b'{"digests": [' + digest + b'], "tenant": "' + b"x" * 300 + b'"}',
        b'{"session": "agent", "retain_seconds": 1e999}',
        b"\xff\xfe",
        b'{"tenant": "a", "quota_bytes": 4096}',
        b'{"tenant": "a", "quota_bytes": -1}',
        b'{"tenant": "", "quota_bytes": 99999999999999999999999}',
        b'{"draining": false}',
        b'{"level": "debug"}',
        b'{"level": "loud"}',
    ]
    requests = [bytes([path, flags]) + b"\0" + body for path in range(10) for flags in (4, 0) for body in bodies]
    hosts = [b"evil.example", b"[::1]:1", b"[", b"localhost:x", b"\xff", b"127.0.0.1"]
    return [
        *requests,
        *(bytes([path, 1]) + b"x\0" for path in range(len(_PATHS))),
        *(bytes([path, 9]) + host + b"\0" for path in range(len(_PATHS)) for host in hosts),
        b"\0\0Bearer \xff\0{}",
    ]
