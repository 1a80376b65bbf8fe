"""`release.py` makes releases in a clone of this repository."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.metadata import parse_email

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/maintainers/kvdepot"
NAMED = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
TITLES = re.compile(r"^## (.*?) \((.*)\)$", re.MULTILINE)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-tags", ROOT, folder], check=True)
    return folder


def run_release(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "release.py", *arguments]
    return subprocess.run(
        command, cwd=clone, check=False, capture_output=True, text=True, timeout=600, env={**os.environ, **NAMED}
    )


def git(clone: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=clone, check=True, capture_output=True, text=True, env={**os.environ, **NAMED}
    )
    return done.stdout.strip()


def next_versions(changelog: str) -> list[str]:
    """Return the version whose section is a draft, if there is one, and the one after the newest."""
    newest, date = TITLES.findall(changelog)[0]
    major, minor, _ = newest.split(".")
    return [*([newest] if date == "not released" else []), f"{major}.{int(minor) + 1}.0"]


def test_a_release_is_a_commit_a_tag_and_files_that_agree(clone: Path) -> None:
    versions = next_versions((clone / "CHANGELOG.md").read_text())
    for version in versions:
        (clone / "changes" / "any.added.md").write_text("Something was added.\n")
        git(clone, "add", "--all")
        git(clone, "commit", "--quiet", "--message", "Add something")
        done = run_release(clone, version, "--repository", REPOSITORY)
        assert done.returncode == 0, done.stderr
        assert git(clone, "describe", "--exact-match") == f"v{version}"
        assert git(clone, "status", "--porcelain") == ""
        (date,) = (date for each, date in TITLES.findall((clone / "CHANGELOG.md").read_text()) if each == version)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert [each.name for each in (clone / "changes").iterdir()] == ["README.md"]
        assert (clone / "tests" / "releases" / version / "frames.txt").is_file()
        assert f"image: kvdepot:{version}" in (clone / "deploy/kubernetes/depot/depot.yaml").read_text()
        assert f"\nversion: {version}\n" in (clone / "deploy/helm/Chart.yaml").read_text()
        wheels, archives = ([*(clone / "dist").glob(pattern)] for pattern in ("*.whl", "*.tar.gz"))
        assert len(wheels) == len(archives) == 8, "and none of the release before"
        assert all(f"-{version}" in path.name for path in (*wheels, *archives))
        with tarfile.open(clone / "dist" / f"kvdepot_cuda-{version}.tar.gz") as archive:
            member = archive.extractfile(f"kvdepot_cuda-{version}/PKG-INFO")
            assert member is not None
            fields, _ = parse_email(member.read())
        assert f"kvdepot=={version.rpartition('.')[0]}.*" in fields.get("requires_dist", [])
        assert fields.get("project_urls", {})["Repository"] == REPOSITORY
        bill = json.loads((clone / "dist" / f"kvdepot-{version}.cdx.json").read_text())
        components = {each["name"]: each.get("version") for each in bill["components"]}
        assert components["kvdepot-cpu"] == version
        assert "pyzmq" in components
    assert f"{versions[-1]} is released already" in run_release(clone, versions[-1]).stderr


def test_a_release_that_cannot_be_made_or_is_dry_changes_nothing(clone: Path, tmp_path: Path) -> None:
    before = git(clone, "rev-parse", "HEAD")
    assert "give X.Y.Z" in run_release(clone, "1.0").stderr
    assert "give --repository" in run_release(clone, "9.0.0").stderr
    (clone / "README.md").write_text("changed")
    assert "uncommitted changes" in run_release(clone, "9.0.0", "--repository", REPOSITORY).stderr
    dry = run_release(clone, "9.0.0", "--repository", REPOSITORY, "--dry-run", "--out-dir", str(tmp_path / "files"))
    assert dry.returncode == 0, dry.stderr
    assert len([*(tmp_path / "files").glob("*-9.0.0*")]) == 17
    assert git(clone, "rev-parse", "HEAD") == before
    assert git(clone, "status", "--porcelain") == "M README.md"
    assert git(clone, "tag", "--list", "v9*") == ""
