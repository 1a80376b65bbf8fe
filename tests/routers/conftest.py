import contextlib
from collections.abc import Iterator

import pytest

from support.routers import Node


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with contextlib.ExitStack() as opened:
        nodes: list[Node] = []
        for name in "ABC":
            nodes.append(Node(name))
            opened.callback(nodes[-1].close)
        yield nodes
