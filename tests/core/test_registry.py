"""Finding backends."""

import re
from unittest.mock import Mock

import pytest

from kvdepot import get_backend, list_backends
from kvdepot.errors import BackendUnavailable
from kvdepot.installing import install_line


def test_every_known_backend_is_listed_installed_or_not() -> None:
    assert {"cpu", "cuda", "xpu", "hpu"} <= {backend.name for backend in list_backends()}


@pytest.mark.promise(34)
def test_an_unknown_backend_is_an_error_that_names_the_installed_ones() -> None:
    with pytest.raises(BackendUnavailable, match="installed are"):
        get_backend("abacus")


@pytest.mark.promise(34)
def test_a_backend_that_is_not_installed_is_an_error_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.backends.entry_points", Mock(return_value=()))
    with pytest.raises(BackendUnavailable, match=re.escape(install_line("cpu"))):
        get_backend("cpu")
