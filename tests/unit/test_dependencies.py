"""Every third-party module that the code imports is declared in pyproject.toml."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_mcp.environments.build import BASE_PACKAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "jwt": "pyjwt",
    "opentelemetry": "opentelemetry-api",
    "zmq": "pyzmq",
}
"""Distributions whose module has another name."""
OURS = {"kernel_mcp", "kernel_specs", "mcp_tools", "tools"}
OF_EXTRAS = {
    "kernel_mcp/fleet": "fleet",
    "kernel_mcp/fleet/metrics.py": "http",
    "kernel_mcp/lab": "lab",
    "kernel_mcp/telemetry/metrics.py": "http",
}
"""Parts of the server that require an extra."""
OF_CODE = {"numpy", "torch", "pillow"}
"""Imported in a kernel only if its code has imported them."""
INSIDE = {
    "ipykernel": "its kernel, shell and application are subclassed",
    "ipython": "its shell and formatters are subclassed",
    "jupyter-client": "its session and provisioner are subclassed",
    "jupyter-server": "its managers are subclassed",
    "mcp": "its low-level server and its sessions over HTTP are private",
    "mcp-types": "belongs to a version of mcp",
    "pydantic": "the configuration of its base class is changed",
    "ray": "the argument _node_ip_address",
    "starlette": "belongs to a version of mcp",
    "uvicorn": "its protocol is subclassed",
}
"""Distributions of which private or subclassed parts are used, with a reason: they are bounded."""


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the file and the distribution of each third-party import below a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names}:
                if top not in OURS and top not in sys.stdlib_module_names:
                    name = canonicalize_name(DISTRIBUTIONS.get(top, top))
                    yield str(path.relative_to(ROOT)), name


def declared(*extras: str) -> dict[str, Requirement]:
    """Return the requirements of the server and of these extras by name."""
    words = [*PROJECT["dependencies"], *(word for extra in extras for word in EXTRAS[extra])]
    found = map(Requirement, words)
    return {canonicalize_name(each.name): each for each in found}


def test_every_import_of_the_server_is_declared() -> None:
    missing = []
    for path, name in imported("kernel_mcp"):
        extras = [extra for part, extra in OF_EXTRAS.items() if path.startswith(part)]
        if name not in declared(*extras):
            missing.append(f"{path} imports {name}")
    assert missing == []


def test_every_import_of_a_kernel_comes_with_its_environment() -> None:
    base = {canonicalize_name(Requirement(each).name) for each in BASE_PACKAGES}
    with_ipykernel = {
        canonicalize_name(Requirement(each).name) for each in requires("ipykernel") or ()
    }
    known = base | with_ipykernel | OF_CODE
    assert [pair for pair in imported("kernel_specs") if pair[1] not in known] == []


def test_an_environment_of_jupyter_has_what_environments_of_kernels_have() -> None:
    assert set(BASE_PACKAGES) == set(EXTRAS["jupyter"])


def test_no_declared_requirement_is_unused() -> None:
    used = {name for folder in OURS for _, name in imported(folder)}
    assert set(declared(*EXTRAS)) - used == {"jupyter-collaboration"}  # an extension of JupyterLab


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_used_from_inside_has_an_upper_bound(name: str) -> None:
    assert any(each.operator == "<" for each in declared(*EXTRAS)[name].specifier)
