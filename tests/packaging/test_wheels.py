"""The wheels agree with each other and require nothing heavy."""

import json
import re
import shlex
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

MODULES = {
    "kvdepot": "kvdepot",
    "kvdepot-cpu": "kvdepot_cpu",
    "kvdepot-cuda": "kvdepot_cuda",
    "kvdepot-hpu": "kvdepot_hpu",
    "kvdepot-mooncake": "kvdepot_mooncake",
    "kvdepot-plan": "kvdepot_plan",
    "kvdepot-sglang": "kvdepot_sglang",
    "kvdepot-vllm": "kvdepot_vllm",
}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path, extra: str = "") -> dict[str, Requirement]:
    """Return a wheel's requirements, without an extra or with one."""
    found = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist", [])]
    return {r.name: r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})}


def install(wheels: set[Path], environment: Path) -> Path:
    """Make an environment with wheels and their requirements. Return its Python."""
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(environment)], check=True)
    python = environment / "bin" / "python"
    if wheels:
        run_line(shlex.join(["pip", "install", *map(str, wheels)]), python)
    return python


def run_line(line: str, python: Path, folder: Path | None = None, links: Path | None = None) -> None:
    """Run a `pip install` of a page or a message by uv, as environments have no pip. `links` stands for an index."""
    arguments = shlex.split(line, comments=True)[2:]
    found = ["--find-links", str(links)] if links else []
    command = ["uv", "pip", "install", "--quiet", "--python", str(python), *found, *arguments]
    subprocess.run(command, check=True, cwd=folder)


def fails(command: list[str], folder: Path) -> str:
    """Run a command that exits with 1, and return what it says of that."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 1
    return done.stderr


def test_all_are_built(wheels: dict[str, Path]) -> None:
    assert set(wheels) == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_each_brings_its_license(name: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[name]) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(".dist-info/licenses/LICENSE"))
        assert b"Apache License" in archive.read(path)


@pytest.mark.parametrize("name", MODULES)
def test_each_page_on_an_index_says_what_it_is(name: str, wheels: dict[str, Path]) -> None:
    fields = metadata(wheels[name])
    page = str(fields.get_payload())
    assert page.startswith(f"# {name}\n")
    assert fields["Description-Content-Type"].startswith("text/markdown")
    assert not re.search(r"\]\((?!https://)", page), "a relative link leads nowhere there"
    assert 30 < len(fields["Summary"]) <= 120
    assert {"kv-cache", "llm", "vllm"} <= set(fields["Keywords"].split(","))
    classifiers = set(fields.get_all("Classifier", []))
    assert {
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Typing :: Typed",
    } <= classifiers
    assert not [text for text in classifiers if text.startswith("License ::")], "License-Expression says it"


def test_the_core_s_page_names_every_extra(wheels: dict[str, Path]) -> None:
    fields = metadata(wheels["kvdepot"])
    extras = set(fields.get_all("Provides-Extra", [])) - {"testing"}
    named = {extra for group in re.findall(r"\[([a-z,]+)\]", str(fields.get_payload())) for extra in group.split(",")}
    assert named == extras


def test_versions_and_pins_between_them_agree(wheels: dict[str, Path]) -> None:
    versions = {Version(metadata(wheel)["Version"]) for wheel in wheels.values()}
    assert len(versions) == 1
    (version,) = versions
    for name, wheel in wheels.items():
        extras = metadata(wheel).get_all("Provides-Extra", [])
        for extra in ["", *extras]:
            for requirement in requirements(wheel, extra).values():
                if requirement.name in MODULES:
                    assert requirement.specifier.contains(version), f"{name}[{extra}] asks for {requirement}"


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.promise(40)
def test_none_brings_torch_or_an_engine_by_itself(name: str, wheels: dict[str, Path]) -> None:
    heavy = {"torch", "sglang", "vllm", "intel-extension-for-pytorch", "habana-torch-plugin"}
    assert not heavy & set(requirements(wheels[name]))


@pytest.mark.promise(40)
def test_no_requirement_has_an_upper_bound_that_could_downgrade_an_engine(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        for requirement in requirements(wheel).values():
            if requirement.name not in MODULES:
                assert all(part.operator == ">=" for part in requirement.specifier), str(requirement)


def test_the_extras_of_the_core_name_the_other_packages(wheels: dict[str, Path]) -> None:
    extras = {package.removeprefix("kvdepot-"): package for package in MODULES if package != "kvdepot"}
    for extra, package in (*extras.items(), ("xpu", "kvdepot-cpu")):
        named = requirements(wheels["kvdepot"], extra)[package]
        assert not named.extras, "torch and engines come from the user: an extra of the backend would bring them"
    everything = set(metadata(wheels["kvdepot"]).get_all("Provides-Extra", [])) - {"all", "testing"}
    assert requirements(wheels["kvdepot"], "all")["kvdepot"].extras == everything


@pytest.mark.promise(40)
def test_all_extras_together_bring_neither_torch_nor_an_engine(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = install(set(), tmp_path / "venv")
    run_line("pip install 'kvdepot[all]'", python, links=wheels["kvdepot"].parent)
    code = "import importlib.metadata as m; print(*(each.name for each in m.distributions()))"
    found = set(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert set(MODULES) <= found
    assert not {"torch", "sglang", "vllm"} & found


def test_optional_device_libraries_stay_in_the_metadata(wheels: dict[str, Path]) -> None:
    assert "habana-torch-plugin" in requirements(wheels["kvdepot-hpu"], "gaudi")
    assert "vllm" in requirements(wheels["kvdepot-vllm"], "vllm")
    assert "sglang" in requirements(wheels["kvdepot-sglang"], "sglang")
    assert {"torch", "intel-extension-for-pytorch"} <= set(requirements(wheels["kvdepot-cpu"], "ipex"))


@pytest.mark.parametrize("name", MODULES)
def test_each_carries_types_and_its_licence(name: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[name]) as archive:
        assert f"{MODULES[name]}/py.typed" in archive.namelist()
    assert metadata(wheels[name])["License-Expression"] == "Apache-2.0"


def test_the_cpu_wheel_carries_the_compiled_copy(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["kvdepot-cpu"]) as archive:
        assert any("_copy_runs" in name for name in archive.namelist()), "was there a C compiler?"


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.promise(39)
def test_each_installs_with_the_core_alone_and_imports(name: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    python = install({wheels["kvdepot"], wheels[name]}, tmp_path / "venv")
    heavy = "{'torch', 'sglang', 'vllm', 'numpy', 'zmq', 'kvdepot.server', 'habana_frameworks', 'cuda'}"
    code = f"import sys, {MODULES[name]}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    subprocess.run([str(python), "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "arguments", "added"),
    [
        ("mooncake", ["serve", "--tier", "mooncake://127.0.0.1:1"], "pip install mooncake-transfer-engine-non-cuda"),
        ("plan", ["replay", "TRACE", "--simulate"], "TRACE cannot be read: No such file"),
    ],
)
def test_the_core_alone_names_the_command_that_adds_a_package_and_finds_it_then(
    name: str, arguments: list[str], added: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    python = install({wheels["kvdepot"]}, tmp_path / "venv")
    command = [str(python.with_name("kvdepot")), "--dir", str(tmp_path / "run"), *arguments]
    said = fails(command, tmp_path)
    assert f"pip install {wheels[f'kvdepot-{name}']}" in said
    run_line(said[said.index("pip install") :], python)
    assert added in fails(command, tmp_path)


ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_INSTALLS = re.compile(r"^ *((?:pip install|uvx) .*?) *(?:#.*)?$", re.MULTILINE)
LINES = sorted({line for page in PAGES for line in _INSTALLS.findall(page.read_text())})


@pytest.mark.parametrize("line", LINES)
def test_each_page_installs_as_it_says(line: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    """In an empty environment and the root of a clone. The wheels stand for `dist/` and for an index."""
    folder = wheels["kvdepot"].parent
    if line.startswith("uvx"):
        command = ["uvx", "--isolated", "--python", sys.executable, "--find-links", str(folder), *shlex.split(line)[1:]]
        done = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=300)
        assert json.loads(done.stdout)["wrong_bytes"] == 0
        return
    python = install(set(), tmp_path / "venv")
    run_line(line.replace("dist/*.whl", shlex.join(map(str, wheels.values()))), python, ROOT, folder)
    done = subprocess.run([python.with_name("kvdepot"), "backends", "--json"], check=True, capture_output=True)
    backends = {each["name"]: each for each in json.loads(done.stdout)}
    for name in ("cpu", "cuda", "hpu"):
        if re.search(rf"packages/{name}\b|[\[,]{name}[\],]|dist/", line):
            assert backends[name]["distribution"].startswith("kvdepot-"), backends[name]


def test_the_engines_lines_begin_with_a_gpu() -> None:
    """A reader with a GPU who installs the backend of the CPU gets an engine without a depot."""
    for name in ("README.md", "docs/index.md", "docs/vllm.md"):
        first = re.search(r"pip install (.*packages/vllm_connector)", (ROOT / name).read_text())
        assert first is not None
        assert "packages/cuda" in first[1]


@pytest.mark.promise(35)
def test_from_wheels_alone_a_depot_and_its_cpu_backend_work(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = install({wheels["kvdepot"], wheels["kvdepot-cpu"]}, tmp_path / "venv")
    backends = subprocess.run(
        [str(python.with_name("kvdepot")), "backends"], check=True, capture_output=True, text=True
    )
    cpu = next(line for line in backends.stdout.splitlines() if line.startswith("cpu"))
    assert "usable" in cpu
    code = "import sys, kvdepot.server.loop, kvdepot_cpu; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([str(python), "-c", code], check=False).returncode == 0
