"""Keeps KV under the content that computed it, while weights and adapters change under their names.

The scheduler makes a request's keys when the request arrives. The workers decide later with which weights to compute
it: vLLM loads an adapter's files with the first step that needs them, and writes weights and replaces adapters between
two steps without a word to the scheduler's side. And vLLM's own prefix cache names blocks by an adapter's name and
path, so it still finds blocks of an earlier content.

So each job contains the `Contents` that its keys name. A worker (`WorkerContents`) starts a job only if it computes
with exactly these, and reports every change with the next step. The scheduler's side (`EngineContents`) then ends the
loads and stores of the requests that the change concerns. From then on, blocks that vLLM finds in its own cache may be
older than the keys. Until that cache has been empty once, a request that finds any neither loads nor stores.
"""

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvdepot.engines.identity import fingerprint, weights_in
from kvdepot_vllm.engine import BlockPool, EngineRequest

logger = logging.getLogger(__name__)

WRITING_METHODS: Final = ("reload_weights", "update_weights")
"""Methods of vLLM's worker that write new weights into the model, each called between two steps."""


class Loaded(NamedTuple):
    """A content that a worker loaded under vLLM's id of an adapter.

    `number` counts the different contents of that id, so an adapter that changes and changes back is another one: its
    requests may have computed with the content in between.
    """

    content: str
    number: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a request, and the content with which the request is to be computed."""

    id: int
    name: str
    path: str
    loaded: Loaded
    is_reloaded: bool = False  # whether vLLM reads the files again for each step of this request


@dataclass(frozen=True, slots=True)
class Contents:
    """The weights and the adapter that the keys of a request name.

    `updates` is the number of times that the weights were written since the engine started.
    """

    updates: int = 0
    adapter: Adapter | None = None


ORIGINAL: Final = Contents()
"""The weights with which the engine started, without an adapter."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The report of one or more workers that they compute with other contents.

    Attributes:
        since: the first step that may have computed with them.
        updates: how often the weights have been written.
        adapters: by vLLM's id, the contents loaded since the last report; "" if the workers loaded different ones.
    """

    since: int
    updates: int
    adapters: dict[int, Loaded] = field(default_factory=dict[int, Loaded])

    def merge(self, other: "Changes") -> "Changes":
        """Return the report of both."""
        adapters = {**self.adapters, **other.adapters}
        for number in self.adapters.keys() & other.adapters.keys():
            if self.adapters[number] != other.adapters[number]:
                adapters[number] = Loaded("", 0)
        return Changes(max(self.since, other.since), max(self.updates, other.updates), adapters)


class WorkerContents:
    """The contents with which one worker computes. It outlives the registrations of the worker's cache."""

    def __init__(self) -> None:
        self._updates = 0
        self._loaded: dict[int, Loaded] = {}
        self._manager: Any = None
        self._worker: Any = None
        self._undated: dict[int, Loaded] = {}  # loads since the last step began
        self._reported_updates = 0
        self._changes: Changes | None = None

    def watch(self, worker: Any | None, runner: Any | None) -> None:
        """Note from now on each load of an adapter by a runner, and each time that its worker writes weights.

        Idempotent. vLLM passes neither to any hook of connectors, so this wraps methods of these two objects.
        """
        if worker is not None and worker is not self._worker:
            self._worker = worker
            for name in WRITING_METHODS:
                if hasattr(worker, name):
                    setattr(worker, name, self._noting_updates(getattr(worker, name)))
        manager = getattr(runner, "lora_manager", None)
        if manager is not None and manager is not self._manager:
            self._manager = manager
            manager._load_adapter = self._noting_loads(manager._load_adapter)  # noqa: SLF001  # there is no public one

    def _noting_updates(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(write)
        def noting(*args: Any, **options: Any) -> Any:
            try:
                return write(*args, **options)
            finally:  # a failed update may have written some of the weights
                self._updates += 1

        return noting

    def _noting_loads(self, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(load)
        def noting(request: Any) -> Any:
            before = _content_now(request.lora_name, request.lora_path)
            adapter = load(request)
            after = _content_now(request.lora_name, request.lora_path)
            # Files that change while vLLM reads them may give it a mixture. Files without a fingerprint cannot be
            # compared, and a load in place is the user's word that they changed. Both get a name of their own.
            is_told = request.load_inplace and request.lora_int_id in self._loaded and not after.is_fingerprint
            is_sure = before == after and not is_told
            self._note(request.lora_int_id, after.text if is_sure else uuid.uuid4().hex)
            return adapter

        return noting

    def _note(self, adapter_id: int, content: str) -> None:
        loaded = _following(self._loaded.get(adapter_id), content)
        if self._loaded.get(adapter_id) != loaded:
            self._loaded[adapter_id] = self._undated[adapter_id] = loaded

    def begin_step(self, step: int) -> None:
        """Date the changes since the last step, as the step that begins is the first to compute with them.

        A step without a number was not planned. The next one dates them.
        """
        if step and (self._undated or self._updates != self._reported_updates):
            changes = Changes(step, self._updates, self._undated)
            self._changes = changes if self._changes is None else self._changes.merge(changes)
            self._undated, self._reported_updates = {}, self._updates

    def take_changes(self) -> Changes | None:
        """Return the changes that were not reported yet, None if there are none."""
        changes, self._changes = self._changes, None
        return changes

    def computed_with(self, contents: Contents) -> bool:
        """Return whether this worker has computed with just these contents since the scheduler knew of them."""
        adapter = contents.adapter
        is_loaded = adapter is None or self._loaded.get(adapter.id) == adapter.loaded
        return is_loaded and contents.updates == self._updates

    def will_compute_with(self, contents: Contents) -> bool:
        """Return whether the next step would compute with these contents.

        vLLM reads an adapter's files in that step if they are not loaded, because nobody used the adapter yet or others
        took its place.
        """
        adapter = contents.adapter
        if adapter is None or self._manager is None:
            return self.computed_with(contents)
        if adapter.id in self._manager.list_adapters() and not adapter.is_reloaded:
            return self.computed_with(contents)
        content = _content_now(adapter.name, adapter.path).text
        is_same = _following(self._loaded.get(adapter.id), content) == adapter.loaded
        return is_same and contents.updates == self._updates


class _Cached(NamedTuple):
    """The content with which vLLM's own cache has blocks of one adapter's name and path."""

    adapter_id: int
    loaded: Loaded
    since: int  # the first step that may have computed them


class EngineContents:
    """The contents with which an engine's requests are computed, as far as the scheduler's side knows.

    Args:
        get_pool: returns vLLM's pool of blocks, None before it is known.
        keeps_names: whether the user promises that the weights never change, so that their updates do not count.
    """

    def __init__(self, get_pool: Callable[[], BlockPool | None], *, keeps_names: bool) -> None:
        self._get_pool = get_pool
        self._keeps_names = keeps_names
        self._step = 0
        self._updates = 0
        self._loaded: dict[int, Loaded] = {}  # as the workers reported them
        self._in_files: dict[tuple[int, str], str] = {}  # of adapters that no worker has reported yet
        # About the blocks that vLLM's own cache may hold, since it was last empty:
        self._since = 1  # the first step that may have computed any of it
        self._cached: dict[tuple[str, str], _Cached] = {}
        self._is_outdated = False  # whether blocks of other weights may be there
        self._outdated: set[tuple[str, str]] = set()  # adapters of which blocks of other contents may be there

    def next_step(self) -> int:
        """Return the number of the step that is planned now."""
        self._step += 1
        return self._step

    def of(self, request: EngineRequest) -> Contents:
        """Return the contents with which a request that arrives now would be computed."""
        self.look_at_pool()
        lora = request.lora_request
        if lora is None:
            return Contents(self._updates)
        adapter_id, name, path = int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path)
        known, is_reloaded = self._loaded.get(adapter_id), bool(getattr(lora, "load_inplace", False))
        if is_reloaded:
            known = _following(known, _content_now(name, path).text)
        elif known is None:
            if (adapter_id, path) not in self._in_files:
                self._in_files[adapter_id, path] = content_of_adapter(name, path)
            known = Loaded(self._in_files[adapter_id, path], 1)
        if not known.content:  # the workers disagree: a name that nobody else has, and that no worker confirms
            known = Loaded(uuid.uuid4().hex, 0)
        return Contents(self._updates, Adapter(adapter_id, name, path, known, is_reloaded))

    def admit(self, contents: Contents) -> bool:
        """Note that vLLM may now give a request blocks. Return whether blocks in its own cache may be outdated."""
        adapter = contents.adapter
        if adapter is None:
            return self._is_outdated
        place = adapter.name, adapter.path
        cached = self._cached.setdefault(place, _Cached(adapter.id, adapter.loaded, self._step + 1))
        if cached.loaded.content != adapter.loaded.content:
            self._outdated.add(place)
        return self._is_outdated or place in self._outdated

    def take(self, changes: Changes) -> bool:
        """Take the workers' report. Return whether the weights were written."""
        for place, cached in self._cached.items():
            new = changes.adapters.get(cached.adapter_id, cached.loaded)
            if new == cached.loaded:
                continue
            if cached.since < changes.since:
                self._outdated.add(place)
            else:  # all its blocks were computed after the change
                self._cached[place] = cached._replace(loaded=new)
        self._loaded.update(changes.adapters)
        for place in [place for place in self._in_files if place[0] in changes.adapters]:
            del self._in_files[place]
        if changes.updates == self._updates:
            return False
        self._updates = changes.updates
        if self._keeps_names:
            return False
        self._is_outdated |= self._since < changes.since
        return True

    def concern(self, changes: Changes, contents: Contents) -> bool:
        """Return whether a request computes with other contents than its keys name, now that these have changed."""
        adapter = contents.adapter
        if adapter is not None and changes.adapters.get(adapter.id, adapter.loaded) != adapter.loaded:
            return True
        return contents.updates != changes.updates and not self._keeps_names

    def reset(self) -> None:
        """Note that the engine is told of new weights: the blocks of its own cache were computed with others.

        vLLM also tells its connector of a reset that it could not make itself, because blocks were in use.
        """
        self._is_outdated = True
        self.look_at_pool()

    def look_at_pool(self) -> None:
        """Note whether vLLM's own cache is empty: no block has a hash, and none is in use that could get one."""
        pool = self._get_pool()
        if pool is None or len(pool.cached_block_hash_to_block):
            return
        if pool.get_num_free_blocks() == len(pool.blocks) - 1:  # all but the null block
            self._since, self._is_outdated = self._step + 1, False
            self._cached.clear()
            self._outdated.clear()


class _Now(NamedTuple):
    text: str
    is_fingerprint: bool


def _following(loaded: Loaded | None, content: str) -> Loaded:
    """Return the state of a worker after it reads `content` in place of `loaded`."""
    if loaded is None:
        return Loaded(content, 1)
    return loaded if loaded.content == content else Loaded(content, loaded.number + 1)


def content_of_adapter(name: str, path: str) -> str:
    """Return a text that identifies the content of an adapter's files; its name and path if they have no fingerprint.

    Logs how well the fingerprint tells contents apart.
    """
    return weights_in(Path(path), f"weights of adapter {name}") or _named(name, path)


def _content_now(name: str, path: str) -> _Now:
    """Like `content_of_adapter`, but without its log lines, as vLLM may read an adapter in every step."""
    try:
        found = fingerprint(Path(path)).text(Path(path))
    except OSError:
        found = ""
    return _Now(found or _named(name, path), bool(found))


def _named(name: str, path: str) -> str:
    return json.dumps(["adapter", name, path])
