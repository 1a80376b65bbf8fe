from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheels", type=Path, help="the folder with the built wheels")


@pytest.fixture(scope="session")
def wheels(request: pytest.FixtureRequest) -> dict[str, Path]:
    """The wheels by distribution name."""
    folder = request.config.getoption("--wheels")
    if folder is None:
        pytest.skip("needs --wheels, see tox.toml")
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
