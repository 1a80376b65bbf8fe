"""`deploy/` and `.github/workflows/` are valid and fit the code. Nothing of them is built or run here."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.cli import make_parser
from kvdepot.operate.http_app import create_app
from kvdepot.operate.serve import HttpSettings, read_configs
from kvdepot.tiers.url import TierUrl
from support.chart import TEMPLATES, templates
from support.http import status_of_app
from support.tools import needs_tool

DEPLOY = Path(__file__).parents[2] / "deploy"
WORKFLOWS = sorted((DEPLOY.parent / ".github" / "workflows").glob("*.yml"))
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = (  # those that users apply
    *("base", "sglang", "mooncake", "router", "llm-d", "dynamo", "two-sockets", "monitoring", "tier-gc", "cleanup"),
)
needs_kubectl = needs_tool(shutil.which("kubectl"), "needs kubectl 1.22 or later (Debian: kubernetes-client)")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def needs_checker(name: str) -> pytest.MarkDecorator:
    """Return a mark for tests of a tool of the group `deploy`. If it is missing, they fail in tox's `lint` alone."""
    is_missing = (
        shutil.which(name) is None and find_spec(name) is None and not os.environ.get("KVDEPOT_REQUIRE_CHECKERS")
    )
    return pytest.mark.skipif(is_missing, reason=f"needs {name}: uv sync --group deploy")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def rendered(overlay: str) -> str:
    """Return the YAML that `kubectl apply -k` would send."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / overlay)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered(overlay)))


def workloads(overlay: str = "base") -> dict[str, dict[str, Any]]:
    """Return the pods of daemon sets and deployments, by name."""
    return {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for document in documents(overlay)
        if document["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
    }


@needs_checker("hadolint")
@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("Dockerfile*")), ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    run("hadolint", str(path))


@needs_kubectl
@needs_checker("kubernetes-validate")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_knows_every_field(overlay: str, tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered(overlay))
    run("kubernetes-validate", "--strict", str(path))


@needs_kubectl
@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each not in ("tier-gc", "cleanup")])
def test_policies_budgets_services_and_monitors_select_pods_that_are_there(overlay: str) -> None:
    pods = [
        document["spec"]["template"]
        for each in {overlay, "base"}
        for document in documents(each)
        if document["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
    ]
    selectors: list[tuple[str, dict[str, str]]] = []
    for document in documents(overlay):
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            selectors.append((document["kind"], spec["selector"]))
        elif document["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            selectors.append((document["kind"], spec["selector"]["matchLabels"]))
        elif document["kind"] == "NetworkPolicy":
            peers = [peer for rule in spec["ingress"] for peer in rule.get("from", ()) if "podSelector" in peer]
            selectors += [(document["kind"], each["podSelector"].get("matchLabels", {})) for each in (spec, *peers)]
    assert selectors
    for kind, labels in selectors:
        found = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        assert found, (kind, labels)
        if kind == "PodMonitor":
            (monitor,) = (each for each in documents(overlay) if each["kind"] == kind)
            (port,) = (each["port"] for each in monitor["spec"]["podMetricsEndpoints"])
            assert port in {each["name"] for pod in found for each in pod["spec"]["containers"][0]["ports"]}


@needs_kubectl
def test_a_tier_of_mooncake_keeps_its_memory_outside_the_depot() -> None:
    """`tests/mooncake_tier/test_mooncake.py` runs the same programs with the same flags."""
    pods = workloads("mooncake")
    (url,) = (each for each in pods["kvdepot"]["containers"][0]["args"] if each.startswith("--tier="))
    tier = TierUrl.parse(url.removeprefix("--tier="))
    assert tier.location == "mooncake://mooncake-master:50051"
    assert tier.options["segment"] == "0"
    flags = dict(each.split("=", 1) for each in pods["mooncake-client"]["containers"][0]["args"])
    assert flags["--master_server_address"] == tier.location.removeprefix("mooncake://")
    assert int(flags["--global_segment_size"]) == 64 << 30


@needs_kubectl
def test_the_router_knows_every_engine_and_reads_the_ports_where_it_publishes() -> None:
    (engines,) = (each for each in documents("router") if each["kind"] == "StatefulSet")
    pods = workloads("router")
    names = [f"vllm-{number}.{engines['spec']['serviceName']}" for number in range(engines["spec"]["replicas"])]
    router, engine = (pods[name]["containers"][0]["args"] for name in ("router", "vllm"))
    assert router[router.index("--worker-urls") + 1 :] == [f"http://{name}:8000" for name in names]
    events = json.loads(engine[engine.index("--kv-events-config") + 1])
    for flag, endpoint in (("--kv-event-source", "endpoint"), ("--kv-event-replay-source", "replay_endpoint")):
        port = events[endpoint].rpartition(":")[2]
        sources = [each.removeprefix(f"{flag}=") for each in router if each.startswith(f"{flag}=")]
        assert sources == [f"http://{name}:8000=tcp://{name}:{port}" for name in names]
    assert f"--kv-event-model={engine[0].removeprefix('--model=')}" in router
    assert any(each.startswith("--events=tcp://127.0.0.1:") for each in pods["kvdepot"]["containers"][0]["args"])


def settings_after(arguments: list[str], flag: str) -> dict[str, Any]:
    return json.loads(arguments[arguments.index(flag) + 1])


@needs_kubectl
def test_engines_of_sglang_use_the_depot_of_their_node() -> None:
    (container,) = workloads("sglang")["sglang"]["containers"]
    flags = re.findall(r"--[\w-]+", (DEPLOY.parent / "docs" / "sglang.md").read_text())
    given = {each.partition("=")[0] for each in container["args"] if each.startswith("--")} - {"--host", "--port"}
    assert given <= {*flags}
    linker = settings_after(container["args"], "--unified-cache-external-linker-config")
    assert linker.pop("linker_extra_config") == {"url": "/run/kvdepot"}
    assert json.dumps(linker) in (DEPLOY.parent / "docs" / "sglang.md").read_text()


@needs_kubectl
def test_llm_d_finds_engines_by_their_label_and_reads_topics_that_name_their_address() -> None:
    (engines,) = (each for each in documents("llm-d") if each["kind"] == "Deployment")
    labels = engines["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/guide"] == "kvdepot"
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    events = settings_after(container["args"], "--kv-events-config")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert events["topic"] == f"kv@$(POD_IP):{ports['http']}@{container['args'][0].removeprefix('--model=')}"
    assert [each["name"] for each in container["env"]] == ["POD_IP"]


def test_kserve_s_engines_get_the_arguments_and_the_folder_of_the_others() -> None:
    page = (DEPLOY.parent / "docs" / "many-nodes.md").read_text()
    template = yaml.safe_load(page.partition("```yaml")[2].partition("```")[0])["spec"]["template"]
    others = next(yaml.safe_load_all((DEPLOY / "kubernetes/engines/vllm.yaml").read_text()))["spec"]["template"]["spec"]
    (container,), (other,) = template["containers"], others["containers"]
    (arguments,) = (each["value"] for each in container["env"] if each["name"] == "VLLM_ADDITIONAL_ARGS")
    flag = "--kv-transfer-config"
    assert settings_after(shlex.split(arguments), flag) == settings_after(other["args"], flag)
    for volume, mount in zip(template["volumes"], container["volumeMounts"], strict=True):
        assert volume in others["volumes"]
        assert mount in other["volumeMounts"]


@needs_kubectl
def test_workers_of_dynamo_use_the_depot_of_their_node() -> None:
    (graph,) = (each for each in documents("dynamo") if each["kind"] == "DynamoGraphDeployment")
    (worker,) = (each for each in graph["spec"]["components"] if each["type"] == "worker")
    pod = worker["podTemplate"]["spec"]
    (container,) = pod["containers"]
    transfer = settings_after(container["args"], "--kv-transfer-config")
    assert transfer == settings_after(workloads()["vllm"]["containers"][0]["args"], "--kv-transfer-config")
    assert settings_after(container["args"], "--kv-events-config")["enable_kv_cache_events"] is True
    assert pod["volumes"][0]["hostPath"] == {"path": "/run/kvdepot", "type": "DirectoryOrCreate"}
    for overlay in ("llm-d", "dynamo"):  # otherwise engines announce nothing of their depots
        assert "--events=tcp://127.0.0.1:5557" in workloads(overlay)["kvdepot"]["containers"][0]["args"]


@needs_kubectl
def test_each_socket_has_a_depot_and_its_engines_find_it() -> None:
    pods = workloads("two-sockets")
    for socket in (0, 1):
        pod = pods[f"kvdepot-socket-{socket}"]
        arguments = pod["containers"][0]["args"]
        assert pod["containers"][0]["command"] == ["numactl"]
        assert arguments[:2] == [f"--cpunodebind={socket}", f"--preferred={socket}"]
        assert arguments[2] == "kvdepot"
        make_parser().parse_args(arguments[3:])
        assert {"path": f"/run/kvdepot/socket-{socket}", "type": "DirectoryOrCreate"} in [
            volume.get("hostPath") for volume in pod["volumes"]
        ]
    (script,) = pods["vllm"]["containers"][0]["args"]
    configuration = re.search(r"--kv-transfer-config '(.*)'$", script, flags=re.DOTALL)
    assert configuration is not None
    settings = json.loads(configuration[1].replace("""'"$socket"'""", "1"))
    assert settings["kv_connector_extra_config"]["kvdepot.url"] == "/run/kvdepot/socket-1"


def rendered_chart(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that `helm install -n kvdepot` would send."""
    import helm_python

    with helm_python.Chart.load(str(TEMPLATES.parent)) as chart:
        texts = chart.render(values, name="kvdepot", namespace="kvdepot")
    return [document for text in texts.values() for document in yaml.safe_load_all(text)]


def test_the_chart_s_templates_are_those_of_the_manifests() -> None:
    remedy = "run `python -m support.chart` in the folder `tests`"
    assert {path.name: path.read_text() for path in TEMPLATES.iterdir()} == templates(), remedy


@needs_checker("helm_python")
@needs_kubectl
def test_the_chart_is_sound_and_sends_what_kustomize_sends() -> None:
    import helm_python

    assert helm_python.lint(str(TEMPLATES.parent))["errors"] == []
    by_kustomize = {each["kind"]: each for each in documents("base") if each["metadata"].get("namespace") == "kvdepot"}
    objects = rendered_chart({})
    assert [each["kind"] for each in objects] == ["DaemonSet", "NetworkPolicy"]
    for each in objects:
        each["metadata"]["namespace"] = "kvdepot"  # as Helm's client does
        assert each == by_kustomize[each["kind"]]


@needs_checker("helm_python")
def test_values_of_the_chart_reach_the_depot() -> None:
    values: dict[str, Any] = {
        "image": "here/kvdepot:1",
        "poolSize": "1GiB",
        "memory": "2Gi",
        "nodeSelector": {"nvidia.com/gpu.present": None, "disk": "fast"},
        "tolerations": [{"key": "any", "operator": "Exists"}],
        "args": ["--tier=disk:///cache/kvdepot"],
        "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
        "volumes": [{"name": "cache", "hostPath": {"path": "/var/cache", "type": "Directory"}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    assert values.keys() == yaml.safe_load((TEMPLATES.parent / "values.yaml").read_text()).keys()
    pod = rendered_chart(values)[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options, config = read_configs(vars(make_parser().parse_args(container["args"])), {})
    assert config.tiers == ("disk:///cache/kvdepot",)
    assert "--pool-size=1GiB" in container["args"]
    assert options.http_token == Path("/etc/kvdepot/token")
    assert container["image"] == values["image"]
    assert [container["resources"][each]["memory"] for each in ("requests", "limits")] == ["2Gi", "2Gi"]
    assert (container["env"], pod["tolerations"]) == (values["env"], values["tolerations"])
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert (pod["volumes"][-1], container["volumeMounts"][-1]) == (values["volumes"][0], values["volumeMounts"][0])


@needs_checker("check-jsonschema")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_github_knows_every_field_of_a_workflow_and_its_scripts_exist(path: Path) -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(path))
    for name in re.findall(r"(?:benchmarks|tests)/[\w/]+\.py", path.read_text()):
        assert (DEPLOY.parent / name).is_file()


@needs_checker("check-jsonschema")
def test_compose_knows_every_field() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml"))


@needs_tool(shutil.which("systemd-analyze"), "needs systemd-analyze (Debian: systemd)")
def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "kvdepot.service").read_text()
    (tmp_path / "kvdepot.service").write_text(unit.replace("/opt/kvdepot/bin/kvdepot", "/bin/true"))
    run("systemd-analyze", "verify", str(tmp_path / "kvdepot.service"))


def command_of_the_unit() -> list[str]:
    unit = (DEPLOY / "systemd" / "kvdepot.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S+/kvdepot (.*)$", unit, flags=re.MULTILINE)
    assert "/etc/kvdepot/kvdepot.toml" in start, "where the first lines of the unit put it"
    return start.replace("/etc/kvdepot", str(DEPLOY / "systemd")).split()


def test_the_unit_s_disk_tier_is_in_a_folder_that_it_may_write(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "kvdepot.service").read_text()
    assert "\nProtectSystem=strict\n" in unit
    assert "\nCacheDirectory=kvdepot\n" in unit
    settings = (DEPLOY / "systemd" / "kvdepot.toml").read_text()
    (tmp_path / "all.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", settings, flags=re.MULTILINE))
    process, config = read_configs({"config": tmp_path / "all.toml"}, {})
    assert [TierUrl.parse(tier).path for tier in config.tiers] == ["/var/cache/kvdepot/tier"]
    assert process.http_token == Path("/etc/kvdepot/token")
    assert config.directory == Path("/run/kvdepot")


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_come_from_the_registry_of_one_file(overlay: str) -> None:
    component = KUBERNETES / "images" / "kustomization.yaml"
    places = [each["newName"] for each in yaml.safe_load(component.read_text())["images"]]
    used = re.findall(r"image: (.*):[\d.]+$", rendered(overlay), flags=re.MULTILINE)
    assert set(used) <= set(places)
    commands = re.sub(r"\s*\\\n#\s*", " ", component.read_text())
    built = re.findall(r"-f (\S+)(?: --build-arg \S+)? -t (\S+):[\d.]+ \. && docker push \2:", commands)
    assert sorted(place for _, place in built) == sorted(places)
    assert all((DEPLOY.parent / path).is_file() for path, _ in built)


def test_the_rules_for_the_operator_are_those_for_prometheus() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "kvdepot-alerts.yml").read_text())
    assert yaml.safe_load((KUBERNETES / "monitoring" / "rules.yaml").read_text())["spec"] == rules


@needs_tool(shutil.which("promtool"), "needs promtool (Debian: prometheus)")
def test_alerts_fire_when_they_should() -> None:
    run("promtool", "check", "rules", str(DEPLOY / "prometheus" / "kvdepot-alerts.yml"))
    run("promtool", "test", "rules", str(DEPLOY / "prometheus" / "kvdepot-alerts-test.yml"))


@needs_kubectl
def test_grafana_gets_the_dashboard() -> None:
    (found,) = (each for each in documents("monitoring") if each["kind"] == "ConfigMap")
    dashboard = (DEPLOY / "grafana" / "kvdepot.json").read_text()
    assert json.loads(found["data"]["kvdepot.json"]) == json.loads(dashboard)
    assert found["metadata"]["labels"] == {"grafana_dashboard": "1"}


@needs_kubectl
def test_a_new_client_of_mooncake_listens_and_has_a_minute_before_the_next_node_s_is_replaced() -> None:
    (client,) = (each for each in documents("mooncake") if each["metadata"]["name"] == "mooncake-client")
    assert client["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    assert client["spec"]["minReadySeconds"] == 60
    (container,) = client["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["tcpSocket"] == {"port": "client"}
    assert f"--port={container['ports'][0]['containerPort']}" in container["args"]


@needs_kubectl
def test_the_cleanup_frees_the_pools_of_deleted_depots_alone(tmp_path: Path) -> None:
    (script,) = workloads("cleanup")["kvdepot-cleanup"]["initContainers"][0]["args"]
    arguments = workloads()["kvdepot"]["containers"][0]["args"]
    (place,) = (each.removeprefix("--pool-dir=/pool/") for each in arguments if each.startswith("--pool-dir="))
    with DepotProcess() as depot, DepotProcess() as stopped:
        (tmp_path / place).symlink_to(depot.pool_directory)
        (tmp_path / "kvdepot-socket-1").symlink_to(stopped.pool_directory)
        stopped.kill()
        here = script.replace("/dev/shm/", f"{tmp_path}/").replace('"$pool"', '"$(readlink -f "$pool")"')
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["sh", "-euc", here]
        busy = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (busy.returncode, "in use by the depot" in busy.stderr) == (1, True)
        depot.kill()
        subprocess.run(command, env=environment, timeout=60, check=True)
        assert not list(depot.pool_directory.glob("*"))
        assert not stopped.pool_directory.exists()


@needs_kubectl
def test_the_depot_is_started_with_flags_that_it_has() -> None:
    (image,) = re.findall(r"^CMD (.*)$", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    (health,) = re.findall(r'CMD (\["kvdepot".*)$', (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    arguments: list[list[str]] = [
        command_of_the_unit(),
        json.loads(image),
        json.loads(health)[1:],
        COMPOSE["services"]["depot"]["command"],
        workloads()["kvdepot"]["containers"][0]["args"],
        workloads("mooncake")["kvdepot"]["containers"][0]["args"],
        workloads("router")["kvdepot"]["containers"][0]["args"],
        workloads()["kvdepot"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1:],
    ]
    for each in arguments:
        make_parser().parse_args(each)


@needs_kubectl
def test_probes_and_prometheus_ask_what_a_depot_answers_them(depot: DepotProcess, tmp_path: Path) -> None:
    """Tests the HTTP of each unit with its own way to a token. Kubelets and Prometheus ask by address."""
    pod = workloads()["kvdepot"]["containers"][0]
    for command in (command_of_the_unit(), pod["args"]):
        options, _ = read_configs(vars(make_parser().parse_args(command)), {})
        token_file = None
        if options.http_token is not None:
            token_file = tmp_path / "token"
            token_file.write_text("x" * 64)
            assert any(options.http_token.is_relative_to(mount["mountPath"]) for mount in pod["volumeMounts"])

        def ask(request: Any, seconds: float) -> Any:
            return ask_depot(request, depot.url, seconds)

        app = create_app(ask, HttpSettings.parse(options.http or "", token_file))
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert status_of_app(app, pod[probe]["httpGet"]["path"], "10.0.0.7:9460") == 200, probe
        assert status_of_app(app, "/tenants", "10.0.0.7:9460") == 401
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "kvdepot-scrape.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "kvdepot", "the name in the alert rules"
    process, _ = read_configs(vars(make_parser().parse_args(command_of_the_unit())), {})
    assert job["static_configs"] == [{"targets": [process.http]}]
    assert job["authorization"] == {"credentials_file": "/etc/kvdepot/token"}


@needs_kubectl
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
    for pod in pods.values():  # engines start without a depot, and both on a node that only takes pods with GPUs
        kinds = {volume["hostPath"]["type"] for volume in pod["volumes"] if volume["name"] == "sockets"}
        assert kinds == {"DirectoryOrCreate"}
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    configurations = [pods["vllm"]["containers"][0]["args"][-1], COMPOSE["services"]["vllm"]["command"][-1]]
    for configuration in configurations:
        assert json.loads(configuration)["kv_connector_extra_config"] == {"kvdepot.url": "/run/kvdepot"}
    for container in (pods["vllm"]["containers"][0], pods["kvdepot"]["containers"][0]):
        assert "/run/kvdepot" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert COMPOSE["services"]["vllm"]["volumes"] == ["sockets:/run/kvdepot"]
    assert not {"ipc", "pid", "network_mode", "privileged"} & COMPOSE["services"]["vllm"].keys()
