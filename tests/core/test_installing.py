"""Messages name the command that installs a further package from where kvdepot itself came from."""

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvdepot import installing
from kvdepot.installing import install_line


def install_from(url: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put a distribution of kvdepot that an installer took from `url`, None for an index, before the real one."""
    metadata = tmp_path / "site" / "kvdepot-9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvdepot\nVersion: 9\n")
    if url is not None:
        (metadata / "direct_url.json").write_text(json.dumps({"url": url}))
    monkeypatch.setattr("sys.path", [str(tmp_path / "site"), *sys.path])


@pytest.mark.parametrize("url", [None, "https://example.org/kvdepot-9-py3-none-any.whl"])
def test_from_an_index_it_names_the_package(url: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_from(url, monkeypatch, tmp_path)
    assert install_line("mooncake") == "pip install kvdepot-mooncake"
    assert install_line("xpu") == "pip install kvdepot-cpu"


def test_from_a_clone_it_names_the_folder_beside_the_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = tmp_path / "a clone"
    (packages / "cuda").mkdir(parents=True)
    (packages / "cuda" / "pyproject.toml").touch()
    install_from(f"{(packages / 'core').as_uri()}", monkeypatch, tmp_path)
    assert install_line("cuda") == f"pip install '{packages / 'cuda'}'"


def test_from_a_folder_of_wheels_it_names_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "kvdepot_cpu-9-cp311-abi3-linux_x86_64.whl"
    wheel.touch()
    install_from((tmp_path / "kvdepot-9-py3-none-any.whl").as_uri(), monkeypatch, tmp_path)
    assert install_line("cpu") == install_line("xpu") == f"pip install {wheel}"


def test_from_a_folder_that_is_gone_or_without_metadata_it_names_the_folder_in_a_clone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_from("file:///nowhere/packages/core", monkeypatch, tmp_path)
    assert install_line("plan") == "in a clone of kvdepot, pip install packages/plan"

    def distribution(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installing, "distribution", distribution)
    assert install_line("plan") == "in a clone of kvdepot, pip install packages/plan"
