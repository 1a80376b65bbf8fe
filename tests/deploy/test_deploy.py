"""What is in `deploy/` is what its readers take it for; nothing of it is built or run here."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvdepot.cli import _parser  # pyright: ignore[reportPrivateUsage]

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def workloads() -> dict[str, dict[str, Any]]:
    """Return the pods of daemon sets and deployments, by name."""
    documents = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
    return {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for document in documents
        if document["kind"] in ("DaemonSet", "Deployment")
    }


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("Dockerfile*")), ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    run("hadolint", str(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_field(path: Path) -> None:
    run("kubernetes-validate", "--strict", str(path))


def test_compose_knows_every_field() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "kvdepot.service").read_text()
    (tmp_path / "kvdepot.service").write_text(unit.replace("/opt/kvdepot/bin/kvdepot", "/bin/true"))
    run("systemd-analyze", "verify", str(tmp_path / "kvdepot.service"))


def test_the_depot_is_started_with_flags_that_it_has() -> None:
    unit = (DEPLOY / "systemd" / "kvdepot.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S+/kvdepot (.*)$", unit, flags=re.MULTILINE)
    (image,) = re.findall(r"^CMD (.*)$", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    (health,) = re.findall(r'CMD (\["kvdepot".*)$', (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    arguments: list[list[str]] = [
        start.split(), json.loads(image), json.loads(health)[1:], COMPOSE["services"]["depot"]["command"],
        workloads()["kvdepot"]["containers"][0]["args"],
    ]  # fmt: skip
    for each in arguments:
        _parser().parse_args(each)


def test_engines_find_the_depot_s_folder_and_need_nothing_else_of_the_host() -> None:
    pods = workloads()
    for pod in pods.values():
        assert not {"hostIPC", "hostPID", "hostNetwork"} & pod.keys()
        assert not any(container.get("securityContext", {}).get("privileged") for container in pod["containers"])
    folders = {
        name: {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
        for name, pod in pods.items()
    }
    assert folders == {"kvdepot": {"/run/kvdepot", "/dev/shm"}, "vllm": {"/run/kvdepot"}}
    configurations = [
        pods["vllm"]["containers"][0]["args"][-1], COMPOSE["services"]["vllm"]["command"][-1],
    ]  # fmt: skip
    for configuration in configurations:
        assert json.loads(configuration)["kv_connector_extra_config"] == {"kvdepot.url": "/run/kvdepot"}
    for container in (pods["vllm"]["containers"][0], pods["kvdepot"]["containers"][0]):
        assert "/run/kvdepot" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert COMPOSE["services"]["vllm"]["volumes"] == ["sockets:/run/kvdepot"]
    assert not {"ipc", "pid", "network_mode", "privileged"} & COMPOSE["services"]["vllm"].keys()
