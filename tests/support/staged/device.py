"""A pretend accelerator made of host memory, in pure Python. It tests the worker side of a backend without the
device.

After `install()` a tensor can have `device="hpu"`, `torch.hpu` has streams and events, and `habana_frameworks` can be
imported. Torch reserves the name xpu, so an Intel GPU is pretended under the same name, and its backend writes
`getattr(torch, tensor.device.type)`. The device stays until the process ends; `lazy` may change between tests. The
module needs an experimental function of torch, tried with 2.13. Importing it loads no torch.

It is stricter than a device, so that a forgotten step causes wrong bytes or an error:

- Copies with `non_blocking=True` and operations that write into an existing tensor (`out=`, in place) run late, and
  read their operands then. They run when their stream, a later event or the device is waited for, or when a later
  operation of the same stream needs them. Streams are ordered only by `wait_stream`.
- A late copy to the host fills its target with 0xAB until it runs.
- With `lazy`, late work starts only at `mark_step()` on its stream, and a wait before that waits for nothing. The
  real bridge also launches work in other places.
- The host cannot touch device memory (`data_ptr`, `numpy`, `memoryview`). An operation takes no operands in host
  memory, such as an index. With `has_addresses`, `data_ptr` returns device addresses, which are far from those of the
  host.
- `graphs` collects every (operation, shapes and dtypes). A Gaudi compiles each new one, which takes seconds.

It shows that the code uses waits, `mark_step`, shapes, slots and blocks in the right order, on the real code path and
with real threads. It cannot show that the vendor's bridge supports each operation and dtype, or that its streams and
events keep their promises. It has no pinned memory, and its speed says nothing.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, cast

NAME: Final = "hpu"
POISON: Final = 0xAB
ADDRESS_OFFSET: Final = 1 << 62  # of device addresses if `has_addresses` is set: no host memory lies there

_installed: "FakeDevice | None" = None  # for the life of the process, like the name in torch


class Stream:
    """Runs work in order. With `lazy`, work is recorded first and launched by `mark_step`."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self._recorded: list[tuple[int, Callable[[], object]]] = []
        self._launched: list[tuple[int, Callable[[], object]]] = []
        device.streams.add(self)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Queue `work`."""
        with self._device.lock:
            (self._recorded if self._device.lazy else self._launched).append((next(self._device.numbers), work))

    def launch(self) -> None:
        """Launch the recorded work."""
        with self._device.lock:
            self._launched += self._recorded
            self._recorded = []

    def last(self) -> int:
        """Return the number of the last launched work."""
        with self._device.lock:
            return self._launched[-1][0] if self._launched else 0

    def run(self, until: int | None = None) -> None:
        """Run the launched work up to number `until`, or all of it."""
        with self._device.lock, self._device.inference_mode():  # the memory may have been allocated in it
            while self._launched and (until is None or self._launched[0][0] <= until):
                self._launched.pop(0)[1]()

    def drop(self) -> None:
        """Discard the work that has not run."""
        self._launched, self._recorded = [], []

    def finish(self) -> None:
        """Launch and run all work, as a device does for an operation whose result is needed at once."""
        self.launch()
        self.run()

    # --- as in torch ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the launched work."""
        self.run()

    def wait_stream(self, other: "Stream") -> None:
        """Make later work wait for the work that `other` has launched so far."""
        until = other.last()
        self.enqueue(lambda: other.run(until))

    def query(self) -> bool:
        """Return whether all work is done."""
        with self._device.lock:
            return not self._launched and not self._recorded


class Event:
    """A place in a stream."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self._stream: Stream | None = None
        self._until = 0

    # --- as in torch ----------------------------------------------------------------------------------------------

    def record(self, stream: Stream | None = None) -> None:
        """Record the place after the work that the stream has launched so far."""
        self._stream = stream or self._device.current_stream()
        self._until = self._stream.last()

    def synchronize(self) -> None:
        """Wait for the work before the event."""
        if self._stream is not None:
            self._stream.run(self._until)


class FakeDevice:
    """The device; `install` makes the only one."""

    def __init__(self) -> None:
        self.lazy = False
        self.has_addresses = False
        self.graphs = set[tuple[Any, tuple[Any, ...]]]()
        self.lock: Final = threading.RLock()
        self.numbers: Final = itertools.count(1)
        self.streams: Final = weakref.WeakSet[Stream]()
        self.default_stream: Final = Stream(self)
        self._current = threading.local()
        self._torch: Any = importlib.import_module("torch")
        self._is_composite: dict[Any, bool] = {}  # by function: to ask torch takes as long as a small copy
        self._tensor: Any = _tensor_class(self._torch, self)
        self._library: Any = None
        self.module: Final = self._module()

    def inference_mode(self) -> Any:
        """Return torch's mode in which any tensor can be written."""
        return self._torch.inference_mode()

    def current_stream(self, device: Any = None) -> Stream:
        """Return this thread's stream."""
        del device
        return getattr(self._current, "stream", self.default_stream)

    @contextlib.contextmanager
    def stream(self, chosen: Stream) -> Generator[Stream]:
        """Make a stream the current one of this thread inside the block."""
        before = self.current_stream()
        self._current.stream = chosen
        try:
            yield chosen
        finally:
            self._current.stream = before

    def synchronize(self, device: Any = None) -> None:
        """Wait for the launched work of all streams."""
        del device
        for stream in list(self.streams):
            stream.run()

    def mark_step(self, device_str: str = "", sync: bool = False) -> None:
        """Launch the recorded work of this thread's stream. Never wait, not even with `sync`, as on a Gaudi."""
        del device_str, sync
        self.current_stream().launch()

    def drop_pending(self) -> None:
        """Discard all work that has not run. Call it after a test that leaves work behind on purpose."""
        with self.lock:
            for stream in list(self.streams):
                stream.drop()

    # --- running operations ---------------------------------------------------------------------------------------

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation with an operand or a result on the device."""
        with self.lock:
            return self._dispatch(function, args, kwargs)

    def _dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        aten: Any = self._torch.ops.aten
        is_composite = self._is_composite.get(function)
        if is_composite is None:
            is_composite = self._is_composite[function] = self._torch._C._dispatch_has_kernel_for_dispatch_key(
                function.name(), "CompositeImplicitAutograd"
            )
        if is_composite:
            return function.decompose(*args, **kwargs)  # in inference mode `to` and `reshape` come whole
        tensors: list[Any] = []
        plain_args, plain_kwargs = _mapped(partial(self._plain, seen=tensors), [args, kwargs])
        self.graphs.add((function, tuple((tuple(t.shape), t.dtype) for t in tensors)))
        if function is aten.copy_.default:
            return self.copy(*args, **kwargs)
        if function is aten._to_copy.default:
            return self._to_copy(args[0], **kwargs)
        strangers = [t for t in tensors if not self._is_here(t) and t.dim() > 0]
        if strangers and function not in (aten.index.Tensor, aten.index_put_.default):  # torch itself accepts those
            raise RuntimeError(f"expected all tensors on {NAME}, found one on cpu: {function}")
        if "device" in plain_kwargs:
            plain_kwargs["device"] = "cpu"
        if function.is_view:
            return _mapped(self._wrapped, function(*plain_args, **plain_kwargs))
        if function._schema.is_mutable:
            self.current_stream().enqueue(lambda: function(*plain_args, **plain_kwargs))
            return kwargs.get("out", args[0] if args else None)
        self.current_stream().finish()
        return _mapped(self._wrapped, function(*plain_args, **plain_kwargs))

    def _to_copy(
        self, source: Any, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
    ) -> Any:
        plain = self._plain(source)
        wanted = self._torch.device(device).type if device is not None else source.device.type
        raw = self._torch.empty_like(plain, dtype=dtype or source.dtype, device="cpu")
        return self.copy(raw if wanted == "cpu" else self._tensor(raw), source, non_blocking)

    def copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """Copy between host and device, or within the device."""
        with self.lock:
            to_device, from_device = self._is_here(target), self._is_here(source)
            plain_target, plain_source = self._plain(target), self._plain(source)
            if non_blocking or (to_device and from_device):
                if not to_device:
                    self._poison(plain_target)
                self.current_stream().enqueue(lambda: plain_target.copy_(plain_source))
            else:
                self.current_stream().finish()
                plain_target.copy_(plain_source)
            return target

    def _poison(self, target: Any) -> None:
        num_bytes = target.numel() * target.element_size()
        poison = self._torch.full((num_bytes,), POISON, dtype=self._torch.uint8)
        target.copy_(poison.view(target.dtype).view(target.shape))

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, self._tensor)

    def _plain(self, value: Any, seen: list[Any] | None = None) -> Any:
        """Return a device tensor's memory, and other values as they are. Append tensors to `seen`."""
        if seen is not None and isinstance(value, self._torch.Tensor):
            seen.append(value)
        return value.raw if self._is_here(value) else value

    def _wrapped(self, value: Any) -> Any:
        return self._tensor(value) if isinstance(value, self._torch.Tensor) else value

    # --- registration -------------------------------------------------------------------------------------------------

    def _module(self) -> types.ModuleType:
        def new_stream(device: Any = None, **_: Any) -> Stream:
            return Stream(self)

        def new_event(enable_timing: bool = False, **_: Any) -> Event:
            return Event(self)

        module = _new_module("torch." + NAME)
        vars(module).update(
            Stream=new_stream,
            Event=new_event,
            stream=self.stream,
            current_stream=self.current_stream,
            default_stream=lambda device=None: self.default_stream,  # pyright: ignore[reportUnknownLambdaType]
            synchronize=self.synchronize,
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,  # pyright: ignore[reportUnknownLambdaType]
            device=contextlib.nullcontext,
            init=lambda: None,
            _lazy_init=lambda: None,
            _is_in_bad_fork=lambda: False,
            mem_get_info=lambda device=None: (1 << 33, 1 << 34),  # pyright: ignore[reportUnknownLambdaType]
        )
        return module

    def register(self) -> None:
        """Register the device with torch, for the life of the process."""
        backend_registration: Any = importlib.import_module("torch.utils.backend_registration")
        backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=self.module)
        setattr(self._torch, NAME, self.module)

        def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
            return self._tensor(self._torch.empty(size, dtype=dtype))

        def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
            return self._tensor(self._torch.empty_strided(size, stride, dtype=dtype))

        def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
            return self.copy(target, source, non_blocking)

        self._library = self._torch.library.Library("aten", "IMPL")  # keeps the registrations alive
        self._library.impl("empty.memory_format", empty, "PrivateUse1")
        self._library.impl("empty_strided", empty_strided, "PrivateUse1")
        self._library.impl("_copy_from", copy_from, "PrivateUse1")
        self._register_habana()

    def _register_habana(self) -> None:
        root, bridge, core, utils, internal = (
            _new_module("habana_frameworks" + tail)
            for tail in ("", ".torch", ".torch.core", ".torch.utils", ".torch.utils.internal")
        )
        vars(core).update(mark_step=self.mark_step)
        vars(internal).update(is_lazy=lambda: self.lazy)
        vars(utils).update(internal=internal)
        vars(bridge).update(core=core, utils=utils, hpu=self.module, __version__="0.0.fake")
        vars(root).update(torch=bridge)
        sys.modules["habana_frameworks.torch.hpu"] = self.module


def install() -> FakeDevice:
    """Register the device with torch, for the life of this process. A second call returns the same device.

    Raises:
        RuntimeError: a real Gaudi's software has the name, or torch is too old.
    """
    global _installed
    if _installed is None:
        if importlib.util.find_spec("habana_frameworks") is not None:
            raise RuntimeError("habana_frameworks is installed here, so no device can be pretended")
        device = FakeDevice()
        device.register()
        _installed = device
    return _installed


def is_installed() -> bool:
    return _installed is not None


def _new_module(name: str) -> types.ModuleType:
    """Return an empty package that can be imported and found."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the leaves of nested lists, tuples and dicts. torch's `tree_map` took a third of the tests' time."""
    if isinstance(value, (list, tuple)):
        changed = [_mapped(change, each) for each in cast("list[Any]", value)]
        return changed if isinstance(value, list) else tuple(changed)
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in cast("dict[Any, Any]", value).items()}
    return change(value)


def _tensor_class(torch: Any, device: FakeDevice) -> Any:
    class DeviceTensor(torch.Tensor):
        """Pretends to lie on the device. Its bytes are in `raw`, a CPU tensor."""

        @staticmethod
        def __new__(cls: Any, raw: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=torch.device(NAME, 0),
            )

        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def data_ptr(self) -> int:
            if not device.has_addresses:
                raise RuntimeError(f"host access to memory of {NAME} (data_ptr)")
            return self.raw.data_ptr() + ADDRESS_OFFSET

        def numpy(self, **_: Any) -> Any:
            raise TypeError(f"can't convert a tensor on {NAME} to numpy: copy it to the host first")

        def __repr__(self, **_: Any) -> str:
            return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {NAME})"

        @classmethod
        def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return device.dispatch(function, args, kwargs or {})

    return DeviceTensor
