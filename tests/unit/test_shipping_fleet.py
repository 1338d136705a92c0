"""Files to deploy a fleet: they agree with it, with each other and with the docs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from kernel_mcp import __version__
from kernel_mcp.config.load import settings_from, settings_parser
from kernel_mcp.config.settings import OPTIONS, Settings
from kernel_mcp.fleet.cluster import AUTH, TLS, TOKEN, TOKEN_FILE, check_address
from kernel_mcp.fleet.commands import _WITHIN, LAST_S
from kernel_mcp.fleet.handles import check_node
from kernel_mcp.units import duration

ROOT = Path(__file__).parents[2]
FILES = {
    "compose": ROOT / "packaging/container/compose.fleet.yaml",
    "kubernetes": ROOT / "packaging/kubernetes/fleet.yaml",
}
CONTAINERFILE = (ROOT / "packaging/container/Containerfile").read_text()
FLEET = (ROOT / "docs/fleet.md").read_text()
COMPOSE = yaml.safe_load(FILES["compose"].read_text())
SERVER = yaml.safe_load((ROOT / "packaging/container/compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MANIFESTS = list(yaml.safe_load_all(FILES["kubernetes"].read_text()))
(CLUSTER,) = (each["spec"] for each in MANIFESTS if each["kind"] == "RayCluster")
GROUPS = {each["groupName"]: each for each in CLUSTER["workerGroupSpecs"]}
PODS = {"head": CLUSTER["headGroupSpec"]["template"]["spec"]} | {
    name: each["template"]["spec"] for name, each in GROUPS.items()
}
(ONE_SERVER,) = (
    each["spec"]["template"]["spec"]
    for each in yaml.safe_load_all((ROOT / "packaging/kubernetes/kernel-mcp.yaml").read_text())
    if each["kind"] == "Deployment"
)
COMMANDS = {
    **{name: each["command"][0] for name, each in SERVICES.items() if name != "head"},
    **{name: PODS[name]["containers"][0]["args"][0] for name in GROUPS},
}
NODES = ("one", "two", "nodes")
FRONTS = ("front", "fronts")
ENDS = {
    "one": float(duration(SERVICES["one"]["stop_grace_period"])),
    "two": float(duration(SERVICES["two"]["stop_grace_period"])),
    "nodes": float(PODS["nodes"]["terminationGracePeriodSeconds"]),
}


def own_words(where: str) -> list[str]:
    """The arguments of kernel-mcp in a command of the shell, after Ray has started."""
    ray, _, own = COMMANDS[where].partition(" && exec kernel-mcp ")
    assert ray.startswith("ray start --address=")
    return shlex.split(own.replace("$FQ_RAY_IP", "fleet-head-svc.notebooks.svc.cluster.local"))


def settings(words: list[str]) -> Settings:
    parser = settings_parser("kernel-mcp", "", "")
    return settings_from(vars(parser.parse_args(words)))


@pytest.mark.parametrize("where", NODES)
def test_nodes_have_what_a_node_takes(where: str) -> None:
    command, *words = own_words(where)
    assert command == "node"
    names = [word.removeprefix("--name=") for word in words if word.startswith("--name=")]
    assert [check_node(name) for name in names] == ([where] if where != "nodes" else [])
    read = settings([word for word in words if not word.startswith("--name=")])
    check_address(read.fleet)
    assert Path(read.fleet_store).parent == Path("/var/lib/kernel-mcp-fleet")
    assert f" {Path(read.fleet_store).parent} " in CONTAINERFILE  # of uid 1000
    assert read.confined
    assert read.http is None
    assert ENDS[where] >= float(duration(_WITHIN)) + 2 * LAST_S


@pytest.mark.parametrize("where", FRONTS)
def test_fronts_serve_principals_over_http(where: str) -> None:
    read = settings(own_words(where))
    check_address(read.fleet)
    assert read.http == ("0.0.0.0", 8000)
    assert read.tokens is not None
    assert not read.no_auth
    assert not read.fleet_store


def test_nodes_have_the_same_settings_but_for_their_names_and_places() -> None:
    own = {"--name", "--fleet-place"}
    one, two = (
        [word for word in own_words(name) if word.partition("=")[0] not in own]
        for name in ("one", "two")
    )
    assert one == two
    places = [
        re.findall(r"--(?:fleet-place|node-ip-address)=(\S+)", each["command"][0])
        for each in SERVICES.values()
    ]
    assert all(len(set(each)) == 1 for each in places)
    assert len({each[0] for each in places}) == len(SERVICES)


@pytest.mark.parametrize("where", FILES)
def test_flags_and_variables_of_ours_exist(where: str) -> None:
    text = FILES[where].read_text()
    variables = set(re.findall(r"KERNEL_MCP_[A-Z_]+", text))
    assert "KERNEL_MCP_WORKSPACE" in variables  # of the image, which a node does not take
    assert variables <= {option.variable for option in OPTIONS}


@pytest.mark.parametrize("where", FILES)
def test_no_secret_is_in_a_file(where: str) -> None:
    text = FILES[where].read_text()
    assert re.findall(r"\b[A-Za-z0-9]{32,}\b", text) == []
    assert re.findall(rf"{TOKEN}\b", text) == []
    assert not [each for each in MANIFESTS if each["kind"] == "Secret"]
    assert all(set(each) == {"file"} for each in COMPOSE["secrets"].values())


def test_the_version_of_ray_is_that_of_the_lock() -> None:
    lock = (ROOT / "requirements-fleet.lock").read_text()
    (pinned,) = re.findall(r"^ray==(\S+)", lock, re.MULTILINE)
    assert CLUSTER["rayVersion"] == pinned
    assert SERVICES["head"]["build"]["args"] == {"EXTRAS": "http,fleet"}
    assert "--build-arg EXTRAS=http,fleet" in FLEET
    assert '"kernel-mcp[${EXTRAS}] @ file://${wheel}"' in CONTAINERFILE
    assert "--constraints requirements-fleet.lock" in CONTAINERFILE
    images = {pod["containers"][0]["image"] for pod in PODS.values()}
    assert images == {f"ghcr.io/kernel-mcp/kernel-mcp-fleet:{__version__}"}


def test_compose_has_authentication_and_tells_of_tls() -> None:
    for each in SERVICES.values():
        environment = each["environment"]
        assert environment[AUTH] == "token"
        assert environment[TOKEN_FILE] == "/run/secrets/ray-token"
        assert environment["RAY_worker_niceness"] == "0"
        assert each["secrets"] == ["ray-token"]
    text = FILES["compose"].read_text()
    for name in (TLS, "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        assert re.search(rf"^#     {name}: ", text, re.MULTILINE)
    # one machine, of which others see no port of Ray's
    assert {each.get("network_mode") for each in SERVICES.values()} == {None, "service:head"}
    assert SERVICES["head"]["ports"] == ["127.0.0.1:8000:8000"]


def test_compose_gives_nodes_the_rights_of_a_server_and_others_less() -> None:
    server = SERVER["services"]["kernel-mcp"]
    for name, each in SERVICES.items():
        for key in ("cap_drop", "read_only", "tmpfs", "pids_limit", "ulimits"):
            assert each[key] == server[key]
        own = server["security_opt"] if name in NODES else ["no-new-privileges=true"]
        assert each["security_opt"] == own
    stores = {volume for name in ("one", "two") for volume in SERVICES[name]["volumes"]}
    assert stores == {
        *(f"{name}:/var/lib/kernel-mcp" for name in ("one", "two")),
        "store:/var/lib/kernel-mcp-fleet",
    }


TEXT = {"type": "string", "minLength": 1}
TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
}
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["rayVersion", "headGroupSpec"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": TEXT,
        "authOptions": {
            "type": "object",
            "required": ["secretName"],
            "additionalProperties": False,
            "properties": {"mode": {"const": "token"}, "secretName": TEXT},
        },
        "tlsOptions": {"const": {"enabled": True}},
        "headGroupSpec": {
            "type": "object",
            "required": ["template"],
            "additionalProperties": False,
            "properties": {"rayStartParams": PARAMETERS, "template": TEMPLATE},
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "template", "minReplicas", "maxReplicas"],
                "additionalProperties": False,
                "properties": {
                    "groupName": TEXT,
                    "replicas": {"type": "integer"},
                    "minReplicas": {"type": "integer"},
                    "maxReplicas": {"type": "integer"},
                    "rayStartParams": PARAMETERS,
                    "template": TEMPLATE,
                },
            },
        },
    },
}
"""The schema of `ray.io/v1` in KubeRay 1.7 for the used parts of a RayCluster."""


def test_the_cluster_has_what_kuberay_requires() -> None:
    assert [error.message for error in Draft7Validator(SCHEMA).iter_errors(CLUSTER)] == []
    assert set(GROUPS) == {"nodes", "fronts"}
    for group in GROUPS.values():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        # else the operator has its own command wait for the end of Ray
        annotations = group["template"]["metadata"]["annotations"]
        assert annotations == {"ray.io/overwrite-container-cmd": "true"}
    for pod in PODS.values():
        (container,) = pod["containers"]
        # else the operator asks Ray's dashboard, which the image has not
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        env = {each["name"]: each["value"] for each in container["env"]}
        assert env["RAY_worker_niceness"] == "0"
        assert not [name for name in env if "AUTH" in name or "TLS" in name]  # the operator's
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}
    (node,) = PODS["nodes"]["containers"]
    assert {"name": "KERNEL_MCP_WORKSPACE", "value": ""} in node["env"]
    assert f"--node-manager-port={node['ports'][0]['containerPort']} " in COMMANDS["nodes"]
    assert " openssl " in CONTAINERFILE  # of the operator's wait for a certificate


def test_pods_with_kernels_have_the_rights_of_a_server_and_others_less() -> None:
    pod, own = ONE_SERVER["securityContext"], ONE_SERVER["containers"][0]["securityContext"]
    less = {**pod, "seccompProfile": {"type": "RuntimeDefault"}}
    bare = {key: own[key] for key in own if key not in ("procMount", "appArmorProfile")}
    for name, each in PODS.items():
        assert each["hostUsers"] is False
        assert each["automountServiceAccountToken"] is False
        (container,) = each["containers"]
        assert each["securityContext"] == (pod if name == "nodes" else less)
        assert container["securityContext"] == (own if name == "nodes" else bare)


def test_the_manifests_belong_together() -> None:
    kinds = [each["kind"] for each in MANIFESTS]
    expected = ["PersistentVolumeClaim", "RayCluster", "Service", *["NetworkPolicy"] * 2]
    assert kinds == [*expected, "PodDisruptionBudget"]
    claim, cluster, service, policy, fronts, budget = MANIFESTS
    (store,) = (each for each in PODS["nodes"]["volumes"] if each["name"] == "store")
    assert store["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pods = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert service["spec"]["selector"] == {**pods, "ray.io/group": "fronts"}
    assert fronts["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert policy["spec"]["podSelector"]["matchLabels"] == pods
    assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": pods}}
    (within,) = policy["spec"]["ingress"]
    assert within == {"from": [{"podSelector": {"matchLabels": pods}}]}
    (port,) = PODS["fronts"]["containers"][0]["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert fronts["spec"]["ingress"][0]["ports"][0]["port"] == port["containerPort"] == 8000


def test_the_docs_tell_what_was_tried() -> None:
    for path in FILES.values():
        assert f"`{path.relative_to(ROOT)}`" in FLEET
    assert "not run on a cluster of Kubernetes" in FLEET
    assert f"create secret generic {CLUSTER['authOptions']['secretName']} " in FLEET
