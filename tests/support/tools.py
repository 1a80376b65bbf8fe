"""Marks tests that need tools of the system. Python packages are the environments' choice, in `tox.toml`.

On a developer's machine, tests of a missing program or library are skipped with a reason. CI installs all of them, so
there the tests fail: a test that is skipped everywhere shows nothing. GitHub sets the variable CI, and so does
`.ci/run`.
"""

import os
from typing import NoReturn

import pytest


def tool_is_missing(reason: str) -> NoReturn:
    """Skip the test, or fail it in CI. `reason` names the tool and its package."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; in CI that is a failure", pytrace=False)
    pytest.skip(reason)


def needs_tool(is_here: object, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests if a tool is missing. In CI they run without it, and fail."""
    return pytest.mark.skipif(not is_here and not os.environ.get("CI"), reason=reason)
