"""Files to deploy the server: they agree with it, with each other and with the docs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from kernel_mcp import __version__
from kernel_mcp.config.load import settings_from, settings_parser
from kernel_mcp.config.settings import OPTIONS, Settings
from kernel_mcp.linux.syscalls import REFUSED

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CONTAINERFILE = (PACKAGING / "container/Containerfile").read_text()
UNIT = (PACKAGING / "systemd/kernel-mcp.service").read_text()
DEPLOY = (ROOT / "docs/deploy.md").read_text()
README = (ROOT / "README.md").read_text()
CLIENTS = (ROOT / "docs/clients.md").read_text()
COMPOSE = yaml.safe_load((PACKAGING / "container/compose.yaml").read_text())
SECCOMP = json.loads((PACKAGING / "container/seccomp.json").read_text())
REGISTRY = json.loads((PACKAGING / "server.json").read_text())
MANIFESTS = {
    each["kind"]: each
    for each in yaml.safe_load_all((PACKAGING / "kubernetes/kernel-mcp.yaml").read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
FLAGS = {option.flag for option in OPTIONS}
VARIABLES = {option.variable for option in OPTIONS}
OWN = ("container", "systemd", "kubernetes", "proxy")
"""Folders of `packaging` for those who deploy."""


def settings(argv: list[str]) -> Settings:
    return settings_from(vars(settings_parser("kernel-mcp", "", "").parse_args(argv)))


def files() -> Iterator[Path]:
    yield PACKAGING / "server.json"
    for folder in OWN:
        yield from sorted(path for path in (PACKAGING / folder).rglob("*") if path.is_file())


def seconds(text: str) -> int:
    return int(re.sub("s$", "", text))


def unit(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def command_of_image() -> list[str]:
    (found,) = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    return list(json.loads(found))


STARTS = {
    "the image": command_of_image(),
    "compose": COMPOSE["services"]["kernel-mcp"]["command"],
    "systemd": shlex.split(unit("ExecStart")[0])[1:],
    "kubernetes": POD["containers"][0]["args"],
}
ENDS = {
    "compose": seconds(COMPOSE["services"]["kernel-mcp"]["stop_grace_period"]),
    "systemd": seconds(unit("TimeoutStopSec")[0]),
    "kubernetes": POD["terminationGracePeriodSeconds"]
    - POD["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"],
}


@pytest.mark.parametrize("where", STARTS)
def test_every_way_to_deploy_starts_a_server_for_principals(where: str) -> None:
    read = settings(STARTS[where])
    assert read.http is not None
    assert read.http[1] == 8000
    assert read.tokens is not None
    assert read.tokens.name == "tokens"
    assert not read.no_auth


@pytest.mark.parametrize("where", ENDS)
def test_every_way_to_deploy_waits_for_more_than_the_drain(where: str) -> None:
    assert ENDS[where] >= 1.5 * Settings().drain_s


def test_every_file_is_named_by_the_docs() -> None:
    missing = [
        name for path in files() if f"`{(name := str(path.relative_to(ROOT)))}`" not in DEPLOY
    ]
    assert missing == []
    assert "docs/deploy.md" in README


@pytest.mark.parametrize("path", [*map(str, files()), str(ROOT / "docs/deploy.md")], ids=Path)
def test_flags_and_variables_of_ours_exist(path: str) -> None:
    text = Path(path).read_text()
    assert set(re.findall(r"KERNEL_MCP_[A-Z_]+", text)) <= VARIABLES
    program = r"(?:^|\s|bin/)(?<!--tag )(?<!--name )kernel-mcp(?:-server)? "
    said = re.findall(program + r"(--(?:[^|\n`]|\\\n)*)", text)
    words = {word.partition("=")[0] for line in said for word in line.split()}
    assert {word for word in words if re.fullmatch(r"--[a-z-]+", word)} <= FLAGS


def test_versions_are_that_of_the_server() -> None:
    assert REGISTRY["version"] == __version__
    package, image = REGISTRY["packages"]
    assert package["version"] == __version__
    assert image["identifier"] == POD["containers"][0]["image"]
    for text in (DEPLOY, *(path.read_text() for path in files())):
        found = re.findall(r"kernel-mcp-server:([^\s\",]+)", text)
        found += re.findall(r"kernel_mcp-(\d[^-]*)-py3", text)
        assert set(found) <= {__version__}


def test_nothing_of_python_comes_unpinned() -> None:
    bases = re.findall(r"^ARG BASE=(.*)$", CONTAINERFILE, re.MULTILINE)
    assert bases == ["docker.io/library/python:3.12-slim-bookworm"]
    assert re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE) == ["${BASE}"] * 2
    brought = re.findall(r"(?:pip install|uv build)[^&]*", CONTAINERFILE)
    assert len(brought) == 3
    for words in brought:
        assert "requirements-dev.lock" in words or "--require-hashes --requirement /uv.txt" in words
    assert "sed -n '/^uv==/,/[^\\\\]$/p' requirements-dev.lock > /uv.txt" in CONTAINERFILE


def test_the_image_and_its_users_agree_about_places() -> None:
    assert "\nUSER 1000:1000\n" in CONTAINERFILE
    assert '\nENTRYPOINT ["tini", "--", "kernel-mcp"]\n' in CONTAINERFILE
    (volume,) = json.loads(re.findall(r"^VOLUME (.*)$", CONTAINERFILE, re.MULTILINE)[0])
    for place in re.findall(r"KERNEL_MCP_[A-Z_]+=(\S+)", CONTAINERFILE):
        assert Path(place).parent == Path(volume)
    (port,) = re.findall(r"^EXPOSE (\d+)$", CONTAINERFILE, re.MULTILINE)
    assert f"http://127.0.0.1:{port}/healthz" in CONTAINERFILE
    assert f"127.0.0.1:{port}:{port}" in COMPOSE["services"]["kernel-mcp"]["ports"]
    mounted = {each["mountPath"] for each in POD["containers"][0]["volumeMounts"]}
    assert mounted == {volume, "/etc/kernel-mcp", "/tmp"}
    for name in ("nginx.conf", "Caddyfile"):
        assert f"127.0.0.1:{port}" in (PACKAGING / "proxy" / name).read_text()


def calls(action: str) -> set[str]:
    return {
        name for rule in SECCOMP["syscalls"] if rule["action"] == action for name in rule["names"]
    }


def test_the_profile_permits_what_bubblewrap_takes_and_nothing_of_the_machine() -> None:
    allowed, refused = calls("SCMP_ACT_ALLOW"), calls("SCMP_ACT_ERRNO")
    sandbox = {"clone", "clone3", "unshare", "setns", "mount", "umount2", "pivot_root"}
    assert sandbox | {"sethostname", "open_tree", "move_mount", "mount_setattr"} <= allowed
    assert {"execve", "openat2", "pidfd_open", "seccomp", "landlock_restrict_self"} <= allowed
    assert not allowed & refused
    assert SECCOMP["defaultAction"] == "SCMP_ACT_ERRNO"
    machine = {"bpf", "ptrace", "keyctl", "kexec_load", "init_module", "reboot", "io_uring_setup"}
    assert machine | {"perf_event_open", "open_by_handle_at", "userfaultfd", "syslog"} <= refused
    for names in (allowed, refused):
        assert names <= {name for name in names if re.fullmatch(r"[a-z_][a-z0-9_]*", name)}
    # what kernels are refused, too, is permitted here for their sandbox or for programs at most
    for name in REFUSED - refused:
        assert name in allowed or name in {"create_module", "get_kernel_syms", "query_module"}


def test_compose_and_docs_have_the_same_security_options() -> None:
    options = set(COMPOSE["services"]["kernel-mcp"]["security_opt"])
    assert options == {
        "no-new-privileges=true",
        "seccomp=./seccomp.json",
        "apparmor=unconfined",
        "systempaths=unconfined",
    }
    for text in (DEPLOY, CLIENTS):
        for option in ("seccomp=", "apparmor=unconfined", "systempaths=unconfined"):
            assert f"--security-opt {option}" in text
        assert "docker run -i --rm" in text
    assert COMPOSE["services"]["kernel-mcp"]["cap_drop"] == ["ALL"]
    assert COMPOSE["services"]["kernel-mcp"]["read_only"] is True


def test_the_unit_has_what_sandboxes_take_and_nothing_that_breaks_them() -> None:
    assert unit("User") == unit("StateDirectory") == ["kernel-mcp"]
    assert (unit("Delegate"), unit("KillMode")) == (["yes"], ["mixed"])
    told = DEPLOY.partition("## As a service of systemd")[2].partition("## On Kubernetes")[0]
    broken = set(re.findall(r"^\| `([A-Za-z]+)=", told, re.MULTILINE))
    broken |= set(re.findall(r"`([A-Za-z]+)=[a-z]*`, `[A-Za-z]+=", told))
    assert {"RestrictNamespaces", "ProtectKernelTunables", "ProtectHostname"} <= broken
    for option in broken - {"SystemCallFilter", "KillMode"}:
        assert unit(option) == []
    assert unit("SystemCallFilter")[0].startswith("~")
    (families,) = unit("RestrictAddressFamilies")
    assert "AF_NETLINK" in families.split()  # bubblewrap's loopback


def test_the_manifests_belong_together() -> None:
    assert set(MANIFESTS) == {"PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy"}
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    deployment = MANIFESTS["Deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == labels
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (container,) = POD["containers"]
    (port,) = container["ports"]
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    allowed = MANIFESTS["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
    assert allowed == [{"protocol": "TCP", "port": port["containerPort"]}]
    volumes = {each["name"] for each in POD["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_the_pod_has_no_more_rights_than_bubblewrap_takes() -> None:
    pod, own = POD["securityContext"], POD["containers"][0]["securityContext"]
    assert POD["hostUsers"] is False
    assert POD["automountServiceAccountToken"] is False
    assert (pod["runAsNonRoot"], pod["runAsUser"], pod["fsGroup"]) == (True, 1000, 1000)
    assert pod["seccompProfile"] == {"type": "Localhost", "localhostProfile": "kernel-mcp.json"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "procMount": "Unmasked",
        "capabilities": {"drop": ["ALL"]},
        "appArmorProfile": {"type": "Unconfined"},
    }


TEXT = {"type": "string", "minLength": 1}
ARGUMENT = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "named"}, "name": {"pattern": "^--[a-z-]+$"}},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["$schema", "name", "description", "version", "packages"],
    "additionalProperties": False,
    "properties": {
        "$schema": {
            "const": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json"
        },
        "name": {"pattern": "^[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+$", "maxLength": 200},
        "title": {**TEXT, "maxLength": 100},
        "description": {**TEXT, "maxLength": 100},
        "version": {**TEXT, "not": {"pattern": r"[\^~<>=*x]|latest"}},
        "websiteUrl": {"pattern": "^https://"},
        "repository": {"type": "object", "required": ["url", "source"]},
        "packages": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["registryType", "identifier", "transport"],
                "properties": {
                    "registryType": {"enum": ["pypi", "oci"]},
                    "transport": {"const": {"type": "stdio"}},
                    "runtimeArguments": {"type": "array", "items": ARGUMENT},
                    "packageArguments": {"type": "array", "items": ARGUMENT},
                },
            },
        },
    },
}
"""The requirements of the registry's schema of 2025-12-11 on the used parts."""


def test_the_registry_is_told_what_it_requires() -> None:
    assert [error.message for error in Draft7Validator(SCHEMA).iter_errors(REGISTRY)] == []
    assert f"<!-- mcp-name: {REGISTRY['name']} -->" in README
    assert f'io.modelcontextprotocol.server.name="{REGISTRY["name"]}"' in CONTAINERFILE
    package, image = REGISTRY["packages"]
    assert "version" not in image  # it stands in the identifier
    for each in (package, image):
        argv = [
            word
            for argument in each["packageArguments"]
            for word in (argument["name"], argument["default"])
        ]
        assert settings(argv).allow == ("numpy", "pandas", "matplotlib")
    given = {(each["name"], each["value"].partition("=")[0]) for each in image["runtimeArguments"]}
    wanted = ("seccomp", "apparmor", "systempaths", "no-new-privileges")
    assert given >= {("--security-opt", option) for option in wanted}
