"""Operations over HTTP: request bodies and the OpenAPI document, both derived from `kvdepot.wire.operations`."""

from functools import cache
from importlib.metadata import version
from inspect import getdoc
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec.structs import astuple, fields

from kvdepot.wire import operations as o
from kvdepot.wire.operation import Endpoint, Operation, R

STATUS_SECONDS: Final = 5.0  # below the 10 s of a Prometheus scrape
CHANGE_SECONDS: Final = 90.0  # clearing a large cache alternates with requests of engines


class Ask(Protocol):
    """Asks the depot."""

    def __call__(self, request: Operation[R], deadline_seconds: float, /) -> R:
        """Send a request and return the reply; raises like `ask_depot`."""
        ...


_Digests = Annotated[list[str], msgspec.Meta(description="The keys of one prefix's chunks as hex strings")]


class Health(msgspec.Struct):
    """Reply of `/healthz` and `/readyz`."""

    status: str
    why: str = ""


_OPEN: Final = (  # to all, without the token; `http_app` answers them
    Endpoint("GET", "/healthz", "200 if the request loop answers, else 503", shown=Health),
    Endpoint("GET", "/readyz", "200 if the depot accepts stores, else 503", shown=Health),
    Endpoint("GET", "/metrics", "Prometheus metrics; off loopback, and by tenant, only with the token", shown=str),
)


@cache
def body_type(operation: type[o.OperatorRequest]) -> type[msgspec.Struct]:
    """Return the type of a JSON object with the fields of an operation; digests are hex strings."""
    declared: list[Any] = []
    for each in fields(operation):
        is_packed = each.name == "digests"
        kind: Any = _Digests if is_packed else each.type
        default: Any = [] if is_packed else each.default
        declared.append((each.encode_name, kind) if each.required else (each.encode_name, kind, default))
    if operation.may_mean_all:
        declared.append(("means_all", bool, msgspec.field(default=False, name="all")))
    return msgspec.defstruct(
        f"{operation.__name__}Body",
        declared,
        namespace={"__doc__": getdoc(operation)},
        forbid_unknown_fields=True,
        kw_only=True,
    )


def decode_body(operation: type[o.OperatorRequest], data: bytes) -> o.OperatorRequest:
    """Return the request in a JSON body. An empty body means an empty object.

    Raises:
        msgspec.DecodeError: it is malformed.
        ValueError: a digest is not in hex, or the body gives no field without `all`, or fields with `all`.
    """
    body: Any = msgspec.json.decode(data or b"{}", type=body_type(operation))
    given: dict[str, Any] = {each.name: getattr(body, each.encode_name) for each in fields(operation)}
    if "digests" in given:
        given["digests"] = b"".join(map(bytes.fromhex, given["digests"]))
    request = operation(**given)
    if operation.may_mean_all and body.means_all == any(astuple(request)):
        names = ", ".join(f'"{name}"' for name in operation.__struct_encode_fields__)
        raise ValueError(f'give {names}, or "all": true for everything')
    return request


@cache
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of this version."""
    endpoints = [(each, operation) for operation in o.OPERATIONS for each in operation.endpoints]
    endpoints += [(each, None) for each in _OPEN]
    bodies = {each: body_type(operation) for each, operation in endpoints if operation and each.method == "POST"}
    types = [*bodies.values(), *(each.shown for each, _ in endpoints)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each, operation in endpoints:
        media = "text/plain" if each.shown is str else "application/json"
        described: dict[str, Any] = {
            "summary": each.summary,
            "responses": {"200": {"description": "Done", "content": {media: {"schema": schema_of[repr(each.shown)]}}}},
        }
        if each in bodies:
            described["requestBody"] = {"content": {"application/json": {"schema": schema_of[repr(bodies[each])]}}}
            described["responses"]["400"] = {"description": "The body is malformed; nothing was changed"}
        if operation is not None:
            described["security"] = [{"token": []}]
            described["responses"] |= {
                "401": {"description": "The bearer token is missing or wrong"},
                "409": {"description": "The depot refused; nothing was changed"},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvdepot", "version": version("kvdepot"), "description": "Operations of one depot"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
