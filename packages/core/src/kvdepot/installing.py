"""Names the command that installs a further package of kvdepot, for messages to users.

kvdepot's own `direct_url.json` (PEP 610) tells its origin. Beside a clone or a folder of wheels, the command names the
file there: on an index, a stranger could offer packages of these names before kvdepot does.
"""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_PACKAGES: Final = {"xpu": "cpu"}  # of extras of other names


def install_line(extra: str) -> str:
    """Return the command that installs an extra's package from the place that kvdepot came from."""
    package = _PACKAGES.get(extra, extra)
    from_a_clone = f"in a clone of kvdepot, pip install packages/{package}"
    try:
        origin = distribution("kvdepot").read_text("direct_url.json")
    except PackageNotFoundError:  # run from a clone, by PYTHONPATH
        return from_a_clone
    url = urlsplit(str(json.loads(origin)["url"]) if origin else "")
    if url.scheme != "file":
        return f"pip install kvdepot-{package}"
    place = Path(unquote(url.path)).parent
    for found in (*place.glob(f"kvdepot_{package}-*.whl"), *place.glob(f"{package}/pyproject.toml")):
        return f"pip install {shlex.quote(str(found if found.suffix == '.whl' else found.parent))}"
    return from_a_clone  # an image's build, for example, has removed it
