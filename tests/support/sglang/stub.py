# pyright: basic
"""Stubs of packages for GPUs that SGLang imports at module level and never calls on CPU.

`python stub.py` installs them into this Python's environment. Two rules: the attribute `driver` is missing, so that
SGLang falls back to the device "cpu"; and iterating over a stub yields nothing, as torch asks whether "cpu" is among
Triton's backends.
"""

import importlib.abc
import importlib.machinery
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any, Final

VERSIONS: Final = {
    "sgl_kernel": "0.4.10",
    "triton": "3.7.0",
    "torchvision": "0.29.0",
    "torchaudio": "2.11.0",
    "decord": "0",
    "av": "0",
    "cuda": "0",
    "timm": "1.0.25",
    "modelscope": "0",
}


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "driver":
            raise AttributeError(name)
        return Anything

    def __call__(cls, *args: Any, **_: Any) -> Any:
        is_decorator = bool(args) and callable(args[0]) and not isinstance(args[0], _Meta)
        return args[0] if is_decorator else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class Anything(metaclass=_Meta):
    """Stands for every class, function and decorator."""


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package without files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "driver":
            raise AttributeError(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in VERSIONS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__dict__["__version__"] = VERSIONS[spec.name.partition(".")[0]]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if __name__ == "__main__":
    site = Path(sysconfig.get_path("purelib"))
    (site / "kvdepot_gpu_stub.py").write_text(Path(__file__).read_text())
    (site / "kvdepot_gpu_stub.pth").write_text("import kvdepot_gpu_stub\n")
else:
    sys.meta_path.append(_Finder())  # last, so that an installed package is used
