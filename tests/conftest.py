"""How many examples the property tests draw; and what children of the tests find in their environment."""

import os
from pathlib import Path

from hypothesis import settings

os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if path
)

# The tests start hundreds of depots. Where nothing compiled is kept, each start takes 1.5 s instead of .85.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `pytest` draws few examples, tox many: `--hypothesis-profile=ci`. Neither has a deadline: 200 ms, the usual one, fails
# on a busy machine. Tests set no numbers of their own.
_default = settings.get_profile("default")  # not what Hypothesis chooses by itself where CI is set
settings.register_profile("few", _default, max_examples=15, deadline=None)
settings.register_profile("ci", _default, max_examples=100, deadline=None, print_blob=True)
settings.load_profile("few")
