"""Finds accelerator backends by entry point, each by its name and without importing anything heavy."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from kvdepot.errors import BackendUnavailable
from kvdepot.protocols import Backend, DeviceBench

ENTRY_POINT_GROUP = "kvdepot.backends"
MOVER_GROUP = "kvdepot.movers"
BENCH_GROUP = "kvdepot.benches"
KNOWN_BACKENDS = {"cpu": "kvdepot[cpu]", "cuda": "kvdepot[cuda]", "xpu": "kvdepot[xpu]", "hpu": "kvdepot[hpu]"}


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend and whether it can be used here."""

    name: str
    distribution: str  # name and version of the package, "" when none is installed
    device_type: str
    capabilities: tuple[str, ...]
    why_unavailable: str | None


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def get_backend(name: str) -> Backend:
    """Return the backend of a device type: "cpu", "cuda", "xpu", "hpu" or a third party's.

    Raises:
        BackendUnavailable: not installed, broken, or without its device; the message has the way out.
    """
    entry = _entry_points().get(name)
    if entry is None:
        installed = ", ".join(sorted(_entry_points())) or "none"
        way_out = f"pip install '{KNOWN_BACKENDS[name]}'" if name in KNOWN_BACKENDS else f"installed are: {installed}"
        raise BackendUnavailable(f"no backend {name!r} is installed: {way_out}")
    backend = _load(entry)
    reason = backend.why_unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r}: {reason}")
    return backend


def mover_module(name: str) -> str | None:
    """Return the module that is run as a mover of this name, None if none is installed. Imports nothing."""
    return next((entry.module for entry in entry_points(group=MOVER_GROUP, name=name)), None)


def _load(entry: EntryPoint) -> Backend:
    try:
        return entry.load()
    except Exception as error:
        raise BackendUnavailable(f"backend {entry.name!r} ({entry.value}) does not load: {error!r}") from error


def find_benches() -> dict[str, DeviceBench | BackendUnavailable]:
    """Return every bench that a backend brings, by its name; what does not load is the error that says why."""
    found: dict[str, DeviceBench | BackendUnavailable] = {}
    for entry in entry_points(group=BENCH_GROUP):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            found[entry.name] = BackendUnavailable(f"bench {entry.name!r} ({entry.value}) does not load: {error!r}")
    return found


def list_backends() -> list[BackendStatus]:
    """Return every known and every installed backend, with the reason when it cannot be used."""
    found = _entry_points()
    result: list[BackendStatus] = []
    for name in sorted({*found, *KNOWN_BACKENDS}):
        entry = found.get(name)
        if entry is None:
            result.append(BackendStatus(name, "", name, (), f"not installed: pip install '{KNOWN_BACKENDS[name]}'"))
            continue
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
        try:
            backend = _load(entry)
        except BackendUnavailable as error:
            result.append(BackendStatus(name, distribution, name, (), str(error)))
            continue
        capabilities = tuple(sorted(backend.capabilities))
        result.append(BackendStatus(name, distribution, backend.device_type, capabilities, backend.why_unavailable()))
    return result
