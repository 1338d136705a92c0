"""The grants of a server that its principals have, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.attachments import Attachment
from kernel_mcp.config.grants import KINDS, grant_names, restricted_to
from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.secrets import EnvVariable, HeaderSecret
from kernel_mcp.config.settings import GRANTS, OPTIONS, Settings
from kernel_mcp.config.tool_servers import ToolServer

ALL = Settings(
    mounts=(Mount(Path("/srv/a"), "/a"), Mount(Path("/srv/b"), "/b", "rw")),
    network=("example.com", "example.org"),
    devices=(Path("/dev/kvm"),),
    variables=(EnvVariable("TOKEN", "12345678"),),
    secrets=(HeaderSecret("KEY", "api.test"), HeaderSecret("KEY", "other.test")),
    attach=(Attachment("/run/kernel.json"),),
    kernels=(NamedKernelspec("r", "ir"), NamedKernelspec("bash", "bash")),
    tool_servers=(ToolServer("crm", "crm"), ToolServer("git", url="https://git.test/mcp")),
)
NAMES = {
    *("mount:/a", "mount:/b", "network", "device:/dev/kvm", "env:TOKEN", "secret:KEY", "attach"),
    *("kernel:r", "kernel:bash", "tools:crm", "tools:git", "ask"),
}


def test_every_grant_has_a_name() -> None:
    assert grant_names(ALL) == NAMES
    assert grant_names(Settings()) == {"ask"}
    assert grant_names(Settings(ask=())) == frozenset()
    assert grant_names(ALL, ["network", "mount:/c", "env:TOKEN"]) == {"network", "env:TOKEN"}
    assert grant_names(ALL, ["network", "*"]) == NAMES


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("mount:/b", "mounts", ALL.mounts[1:]),
        ("network", "network", ALL.network),
        ("device:/dev/kvm", "devices", ALL.devices),
        ("env:TOKEN", "variables", ALL.variables),
        ("secret:KEY", "secrets", ALL.secrets),
        ("attach", "attach", ALL.attach),
        ("kernel:bash", "kernels", ALL.kernels[1:]),
        ("tools:git", "tool_servers", ALL.tool_servers[1:]),
        ("ask", "ask", ALL.ask),
    ],
)
def test_a_principal_has_what_its_row_names_and_nothing_else(
    name: str, field: str, values: tuple[object, ...]
) -> None:
    found = restricted_to(ALL, [name])
    for other in (each.field for each in KINDS):
        assert getattr(found, other) == (values if other == field else ())


def test_a_star_grants_all_and_no_name_nothing() -> None:
    assert restricted_to(ALL, ["*"]) == restricted_to(ALL, sorted(NAMES)) == ALL
    assert (
        restricted_to(ALL, [])
        == restricted_to(ALL, ["mount:/c", "mount", "secret"])
        == Settings(ask=())
    )


def test_every_setting_that_grants_something_is_of_a_kind() -> None:
    fields = {option.field for option in OPTIONS if option.group == GRANTS}
    fields -= {"gpu"}  # which adds devices and mounts
    fields -= {"tool_file", "allow_tools"}  # which lists and opens those of `tool_servers`
    assert {each.field for each in KINDS} == fields | {"tool_servers"}
