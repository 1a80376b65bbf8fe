"""Says which tools of the system a test needs. Python packages are the environment's choice, in `tox.toml`.

On a developer's machine a missing program or library skips its tests and says so. CI installs all of them, so there it
is a failure: a test that is skipped everywhere shows nothing. GitHub sets the variable CI, and so does `.ci/run`.
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
    """Return the mark of tests that a missing tool skips. In CI they run without it, and fail."""
    return pytest.mark.skipif(not is_here and not os.environ.get("CI"), reason=reason)
