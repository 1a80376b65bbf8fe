"""Makes a release: `python release.py X.Y.Z`, or `just release X.Y.Z`.

Everything happens in a clone: the versions and their pins, the changelog, the files in `tests/releases`, wheels, source
archives and a bill of materials, and `twine check`. Only then does the release's commit and tag come into this
repository, so a release that fails changes nothing. To publish it, push both: `.github/workflows/release.yml` builds
the wheels of every processor from the tag, attests and uploads them.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent
VERSION: Final = re.compile(r'^version = "(.*)"$', re.MULTILINE)


class ReleaseError(Exception):
    """The release cannot be made. The text says what to change."""


def run(*command: str, folder: Path = ROOT) -> str:
    """Run a command and return its output.

    Raises:
        ReleaseError: it failed.
    """
    environment = {**os.environ, "UV_FIND_LINKS": ""}  # uv would write that place into the lock
    environment.pop("UV_LOCKED", None)  # a release has another lock
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def set_versions(folder: Path, version: str, repository: str | None) -> None:
    """Set the version of the chart and of every package, their pins of each other, tags of images, and URLs."""
    before = VERSION.findall((folder / "packages/core/pyproject.toml").read_text())[0]
    series, minor = before.rpartition(".")[0], version.rpartition(".")[0]
    for path in (*folder.glob("packages/*/pyproject.toml"), *folder.glob("examples/*/pyproject.toml")):
        text = path.read_text().replace(f"=={series}.*", f"=={minor}.*")
        if "packages" in path.parts[-3:]:
            text = VERSION.sub(f'version = "{version}"', text, count=1)
            if "[project.urls]" not in text:
                if repository is None:
                    raise ReleaseError(f"{path.parent.name} has no URL: give --repository https://HOST/OWNER/NAME")
                urls = f'[project.urls]\nRepository = "{repository}"\n\n'
                text = text.replace("[build-system]", f"{urls}[build-system]", 1)
        path.write_text(text)
    for path in (*folder.glob("deploy/**/*.yaml"), *folder.glob("deploy/**/*.yml")):
        text = path.read_text().replace(f"kvdepot:{before}", f"kvdepot:{version}")
        path.write_text(text.replace(f"\nversion: {before}\n", f"\nversion: {version}\n"))


def write_changelog(folder: Path, version: str) -> None:
    """Move `changes/` into the changelog. A section of this version that says "not released" replaces them instead."""
    path = folder / "CHANGELOG.md"
    text, draft = path.read_text(), f"## {version} (not released)"
    if draft in text:
        path.write_text(text.replace(draft, f"## {version} ({datetime.datetime.now(datetime.UTC).date()})"))
        for change in (folder / "changes").glob("*.*.md"):
            change.unlink()
    else:
        run("uvx", "towncrier", "build", "--yes", "--version", version, folder=folder)


def build(folder: Path, version: str, output: Path) -> None:
    """Build and check wheels, source archives and the bill of materials."""
    run("uv", "build", "--all-packages", "--out-dir", str(output), "--clear", folder=folder)
    bill = str(output / f"kvdepot-{version}.cdx.json")
    run(
        "uv", "export", "--all-packages", "--all-extras", "--no-dev", "--format=cyclonedx1.5", "-o", bill, folder=folder
    )
    run("uvx", "twine", "check", "--strict", *map(str, [*output.glob("*.whl"), *output.glob("*.tar.gz")]))


def release(version: str, repository: str | None, output: Path, *, is_dry: bool) -> None:
    """Make the release. A dry run leaves only the built files, also of changes that are not committed.

    Raises:
        ReleaseError: a step failed, the version is malformed or taken, or the repository has uncommitted changes.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"{version} is no version: give X.Y.Z")
    if run("git", "tag", "--list", f"v{version}"):
        raise ReleaseError(f"{version} is released already: v{version} is a tag")
    if not is_dry and run("git", "status", "--porcelain"):
        raise ReleaseError("there are uncommitted changes: commit or stash them first")
    state = run("git", "stash", "create") or "HEAD"
    with tempfile.TemporaryDirectory(prefix="kvdepot-release-") as name:
        clone = Path(name)
        run("git", "clone", "--quiet", "--shared", str(ROOT), name)
        run("git", "checkout", "--quiet", run("git", "rev-parse", state), folder=clone)
        set_versions(clone, version, repository)
        write_changelog(clone, version)
        run("uv", "lock", folder=clone)
        run("uv", "run", "--locked", "python", "-m", "support.releases", version, folder=clone / "tests")
        build(clone, version, output.absolute())
        run("git", "add", "--all", folder=clone)
        run("git", "commit", "--quiet", "--message", f"Release {version}", folder=clone)
        if not is_dry:
            run("git", "pull", "--quiet", "--ff-only", name, "HEAD")
            run("git", "tag", "--annotate", f"v{version}", "--message", f"kvdepot {version}")


def main() -> None:
    """Read the arguments and make the release."""
    parser = argparse.ArgumentParser(description="Make a release: its commit, its tag, and its files in dist/.")
    parser.add_argument("version", metavar="X.Y.Z")
    parser.add_argument("--repository", metavar="URL", help="where the project lives; needed for the first release")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "dist", help="default dist/")
    parser.add_argument("--dry-run", action="store_true", help="build and check all of it, and commit nothing")
    options = parser.parse_args()
    try:
        release(options.version, options.repository, options.out_dir, is_dry=options.dry_run)
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    if not options.dry_run:
        print(f"Publish it: git push origin HEAD v{options.version}")


if __name__ == "__main__":
    main()
