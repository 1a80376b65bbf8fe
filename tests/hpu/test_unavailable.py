"""The hpu backend is not built yet, and says so."""

import subprocess
import sys

import pytest

from kvdepot import get_backend, list_backends
from kvdepot.errors import BackendUnavailable
from kvdepot_hpu import backend as planned


@pytest.mark.promise(34)
def test_it_says_in_words_why_it_cannot_be_used() -> None:
    backend = next(backend for backend in list_backends() if backend.name == "hpu")
    assert backend.distribution
    assert backend.why_unavailable is not None
    assert "not built yet" in backend.why_unavailable


@pytest.mark.promise(34)
def test_asking_for_it_is_an_error_with_the_way_out() -> None:
    with pytest.raises(BackendUnavailable, match=r"kvdepot\[cpu\]"):
        get_backend("hpu")


def test_a_context_cannot_be_made_past_the_registry_either() -> None:
    with pytest.raises(BackendUnavailable, match=r"not built yet.*kvdepot\[cpu\]"):
        planned.create_context()


def test_finding_it_loads_no_device_library() -> None:
    code = "import sys, kvdepot_hpu; sys.exit(bool({'torch', 'habana_frameworks'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
