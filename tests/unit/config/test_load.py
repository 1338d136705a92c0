"""Where settings come from, which source wins, and how a mistake is reported."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from kernel_mcp.config.grants import restricted_to
from kernel_mcp.config.load import load, settings_from
from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.settings import OPTIONS, Limits, Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.linux import gpus
from kernel_mcp.units import GIB, MIB
from kernel_specs.restricted import confine
from kernel_specs.restricted.config import BootConfig


def test_without_any_source_the_defaults_hold(tmp_path: Path) -> None:
    assert load({}, {}, tmp_path) == Settings()


def test_a_flag_wins_over_a_variable_over_a_file_over_the_default(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text('memory = "1G"\ntimeout = "1m"\nwait = 5\n')
    environ = {"KERNEL_MCP_TIMEOUT": "2m", "KERNEL_MCP_WAIT": "6", "HOME": "/x"}
    settings = load({"wait": "7s"}, environ, tmp_path)
    assert settings.limits.memory_bytes == GIB
    assert settings.timeout_s == 120
    assert settings.wait_s == 7
    assert settings.grace_s == Settings().grace_s


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load({}, {"KERNEL_MCP_MEMORY": ""}, tmp_path) == Settings()


def test_a_kernel_spec_is_found_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.toml").write_text('kernel = ["r=../specs/ir", "bash=bash"]\n')
    found = load({"config": "conf/mine.toml"}, {}, tmp_path).kernels
    assert [each.spec for each in found] == [str(tmp_path / "specs" / "ir"), "bash"]
    found = load({"kernel": "r=specs/ir"}, {}, tmp_path / "conf").kernels
    assert found[0].spec == str(tmp_path / "conf" / "specs" / "ir")


def test_a_file_that_came_with_the_folder_names_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text('kernel = "r=./ir"\n')
    settings = load({}, {}, tmp_path)
    assert settings.kernels == ()
    assert settings.ignored_keys is not None
    assert "kernel" in str(settings.ignored_keys)


def test_a_token_of_a_server_with_kernels_is_in_no_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        load({"kernel": "lab=http://a@localhost:1/?token=hush-hush"}, {}, tmp_path)
    assert "hush-hush" not in str(told.value)


def test_a_table_in_pyproject_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.kernel-mcp]\nallow = ["numpy", "pandas>=2,<3"]\ndisk = "64M"\n'
    )
    settings = load({"config": "pyproject.toml"}, {}, tmp_path)
    assert settings.allow == ("numpy", "pandas>=2,<3")
    assert settings.limits.disk_bytes == 64 * MIB
    assert load({}, {}, tmp_path).limits.disk_bytes == 64 * MIB


def test_a_pyproject_without_the_table_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert load({}, {}, tmp_path) == Settings()


def test_a_file_of_its_own_is_preferred_to_pyproject(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text("pids = 7\n")
    (tmp_path / "pyproject.toml").write_text("[tool.kernel-mcp]\npids = 8\n")
    assert load({}, {}, tmp_path).limits.pids == 7


def test_a_current_folder_that_may_not_be_entered_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(
        ConfigError, match=r"kernel-mcp\.toml: Permission denied; start the server in"
    ):
        load({}, {}, tmp_path)


def test_a_named_file_replaces_the_found_one(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text("pids = 7\n")
    (tmp_path / "other.toml").write_text("max-sessions = 3\n")
    for sources in (
        load({"config": "other.toml"}, {}, tmp_path),
        load({}, {"KERNEL_MCP_CONFIG": str(tmp_path / "other.toml")}, tmp_path),
    ):
        assert sources.max_sessions == 3
        assert sources.limits.pids == Limits().pids


def test_a_path_in_a_file_is_relative_to_that_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.toml").write_text('workspace = "work"\npython = "bin/python"\n')
    settings = load({"config": "sub/c.toml"}, {}, tmp_path)
    assert settings.workspace == tmp_path / "sub" / "work"
    assert settings.python == str(tmp_path / "sub" / "bin/python")


def test_where_packages_come_from_is_read_from_any_source(tmp_path: Path) -> None:
    (tmp_path / "named.toml").write_text(
        'find-links = ["wheels", "https://x.example/w"]\noffline = true\ninstall-size = "64M"\n'
    )
    flags: dict[str, str | list[str]] = {
        "config": "named.toml",
        "allow-install": ["polars<2,rich", "*"],
        "index-url": "https://mirror.example/simple",
    }
    found = load(flags, {"KERNEL_MCP_ALLOW_SOURCE_BUILDS": "1"}, tmp_path)
    assert found.allow_install == ("polars<2", "rich", "*")
    assert found.index_url == "https://mirror.example/simple"
    assert found.find_links == (str(tmp_path / "wheels"), "https://x.example/w")
    assert (found.offline, found.allow_source_builds) == (True, True)
    assert found.install_bytes == 64 * MIB


def test_a_path_in_a_flag_is_relative_to_the_current_folder(tmp_path: Path) -> None:
    assert load({"workspace": "work"}, {}, tmp_path).workspace == tmp_path / "work"
    assert load({"workspace": "/abs"}, {}, tmp_path).workspace == Path("/abs")


OPERATORS_ALONE = {
    "tool-servers": '"mcp.json"',
    "allow-tool": '"crm.*"',
    "attach": '"/run/kernel.json"',
    "kernel": '"r=ir"',
    "http": '"0.0.0.0:8000"',
    "tokens": '"tokens"',
    "issuer": '"https://login.example"',
    "no-auth": "true",
    "public-url": '"https://notebook.example"',
    "trusted-proxy": '"10.0.0.1"',
    "quota": '"sessions=2"',
    "sse": "true",
    "drain": '"1s"',
    "fleet": '"10.0.0.5:6379"',
    "fleet-place": '"10.0.0.7"',
    "fleet-store": '"/shared"',
    "fleet-key": '"/shared/key"',
    "log-format": '"json"',
    "mount": '["/srv"]',
    "env": '["SECRET=x"]',
    "device": '["/dev/null"]',
    "gpu": "true",
    "secret": '["TOKEN@evil.example"]',
    "requirements": '"requirements.txt"',
    "project": '"."',
    "workspace": '"work"',
    "cache-dir": '"c"',
    "cache-size": '"1M"',
    "state-dir": '"s"',
    "python": '"3.12"',
    "index-url": '"https://elsewhere.example/simple"',
    "find-links": '["wheels"]',
    "sandbox": '"bwrap,landlock"',
    "container-engine": '"docker"',
    "container-image": '"somebody/image"',
    "container-runtime": '"/tmp/program"',
    "no-template": "true",
    "audit-log": '"/etc/cron.d/x"',
    "audit-code": "true",
    "log-level": '"error"',
}
WIDER = {
    "allow": '["numpy"]',
    "profile": '"default"',
    "allow-install": '"*"',
    "offline": "false",
    "allow-source-builds": "true",
    "install-size": "0",
    "memory": "0",
    "cpu": "31.0",
    "cpus": "0",
    "pids": "513",
    "disk": '"2G"',
    "timeout": '"11m"',
    "max-timeout": '"2h"',
    "max-output": "30001",
    "wait": '"51s"',
    "grace": '"4s"',
    "idle-timeout": '"never"',
    "max-sessions": "17",
    "warm": "3",
    "tools": '"core,files"',
    "network": '"other.example.com"',
    "persist": '"3G,7d"',
    "ask": '"1h"',
    "checkpoints": '"auto"',
}
NARROWER = {
    "allow": ('["pandas"]', ("pandas",)),
    "profile": ('"strict"', "strict"),
    "allow-install": ('"rich"', ("rich",)),
    "offline": ("true", True),
    "allow-source-builds": ("false", False),
    "install-size": ('"1G"', GIB),
    "memory": ('"1G"', GIB),
    "cpu": ("29.0", 29),
    "cpus": ("1", 1),
    "pids": ("7", 7),
    "disk": ('"64M"', 64 * MIB),
    "timeout": ('"1m"', 60),
    "max-timeout": ('"30m"', 1800),
    "max-output": ("5000", 5000),
    "wait": ("5", 5),
    "grace": ("1", 1),
    "idle-timeout": ('"1m"', 60),
    "max-sessions": ("1", 1),
    "warm": ("0", 0),
    "tools": ('["core"]', ("core",)),
    "network": ('"a.example.com"', ("a.example.com",)),
    "persist": ('"off"', None),
    "checkpoints": ('"off"', "off"),
    "ask": ('"1m"', (60.0,)),
}
PERMITTED: dict[str, str | list[str]] = {
    "cpu": "30",
    "cpus": "2",
    "offline": "true",
    "tools": "core",
    "checkpoints": "off",
    "profile": "guarded",
    "network": ["a.example.com", "b.example.com"],
}
"""The operator's values where the default does not distinguish wider from narrower."""


def test_every_setting_is_known_to_be_the_operators_or_to_be_narrowed() -> None:
    names = {option.name for option in OPTIONS}
    assert OPERATORS_ALONE.keys() | WIDER.keys() == names
    assert OPERATORS_ALONE.keys() & WIDER.keys() == set()
    assert WIDER.keys() == NARROWER.keys()


@pytest.mark.parametrize(("key", "value"), [*OPERATORS_ALONE.items(), *WIDER.items()])
def test_a_found_file_neither_names_places_nor_widens_what_is_permitted(
    tmp_path: Path, key: str, value: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.kernel-mcp]\n{key} = {value}\n")
    flags = {name: text for name, text in PERMITTED.items() if name == key}
    without = load(flags, {}, tmp_path / "elsewhere")
    settings = load(flags, {}, tmp_path)
    field = next(option.field for option in OPTIONS if option.name == key)
    assert settings.ignored_keys is not None
    assert settings.ignored_keys.keys == (key,)
    for holder, plain in ((settings, without), (settings.limits, without.limits)):
        if hasattr(holder, field):
            assert getattr(holder, field) == getattr(plain, field)
    assert f"{key} in {tmp_path / 'pyproject.toml'} ignored" in str(settings.ignored_keys)
    assert f"--config {tmp_path / 'pyproject.toml'}" in str(settings.ignored_keys)
    assert f"--{key}" in str(settings.ignored_keys)
    assert load({"config": "pyproject.toml"}, {}, tmp_path).ignored_keys is None


@pytest.mark.parametrize(("key", "value", "expected"), [(k, *v) for k, v in NARROWER.items()])
def test_a_found_file_may_narrow_what_is_permitted(
    tmp_path: Path, key: str, value: str, expected: object
) -> None:
    (tmp_path / "kernel-mcp.toml").write_text(f"{key} = {value}\n")
    option = next(option for option in OPTIONS if option.name == key)
    if key in ("allow", "allow-install", "network"):  # nothing is permitted unless it is said
        assert option.narrows(expected, ("*",))
        assert not option.narrows(("*",), expected)
        return
    settings = load({}, {}, tmp_path)
    assert settings.ignored_keys is None
    holder = settings.limits if hasattr(settings.limits, option.field) else settings
    assert getattr(holder, option.field) == expected


def test_what_the_operator_says_holds_against_a_found_file(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text(
        'allow = ["numpy", "evil"]\nmemory = "3G"\ndisk = "1M"\nprofile = "strict"\n'
    )
    flags: dict[str, str | list[str]] = {"allow": ["numpy,pandas"], "disk": "2M"}
    settings = load(flags, {"KERNEL_MCP_MEMORY": "4G"}, tmp_path)
    assert settings.allow == ("numpy", "pandas")
    assert settings.limits.memory_bytes == 4 * GIB
    assert settings.limits.disk_bytes == 2 * MIB
    assert settings.profile == "strict"
    assert settings.ignored_keys is not None
    assert settings.ignored_keys.keys == ("allow",)


def test_refused_keys_are_not_even_read(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text("python = 3\ncache-dir = []\n")
    refusal = load({}, {}, tmp_path).ignored_keys
    assert refusal is not None
    assert refusal.keys == ("python", "cache-dir")
    with pytest.raises(ConfigError, match="in quotes"):
        load({"config": "kernel-mcp.toml"}, {}, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "x = " + "[" * 100_000,
        "#" * (2 * MIB),
        f"{'x' * 100_000} = 1",
        f"memory = '{'x' * 100_000}'",
        f"memory = '{'9' * 400}T'",
        f"memory = {'9' * 5000}",
        f"profile = 0x{'f' * 5000}",
        f"timeout = 0x{'f' * 400}",
    ],
    ids=["deep", "large", "key", "value", "size", "digits", "unshown", "time"],
)
def test_a_hostile_file_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "kernel-mcp.toml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('memry = "1G"', ["there is no setting 'memry'", "did you mean memory?"]),
        ("strict = true", ["there is no setting 'strict' any more: --profile strict is what"]),
        ("hibernate-size = 0", ["'hibernate-size' any more: --persist SIZE,TIME bounds"]),
        ("zzz = 1", ["there is no setting 'zzz'"]),
        ('memory = "2X"', ["memory = '2X'", "512M or 2G"]),
        ("memory = [", ["not valid TOML"]),
        ("allow = [1]", ["allow = [1]", "expected names"]),
        ("max-sessions = 0", ["at least one session"]),
    ],
)
def test_a_bad_file_is_one_line_with_the_remedy(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    (tmp_path / "kernel-mcp.toml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KERNEL_MCP_TIMEOUT=soon: expected a time"):
        load({}, {"KERNEL_MCP_TIMEOUT": "soon"}, tmp_path)


def test_an_unknown_variable_of_ours_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean KERNEL_MCP_MEMORY"):
        load({}, {"KERNEL_MCP_MEMROY": "2G"}, tmp_path)
    with pytest.raises(ConfigError, match="did you mean KERNEL_MCP_CONFIG"):
        load({}, {"KERNEL_MCP_CONFG": "x.toml"}, tmp_path)
    with pytest.raises(ConfigError, match="any more: --profile strict is what it was"):
        load({}, {"KERNEL_MCP_STRICT": "1"}, tmp_path)


def test_a_bad_flag_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sandbox docker: expected auto, bwrap, landlock, c"):
        load({"sandbox": "docker"}, {}, tmp_path)


def test_a_config_file_that_is_missing_or_has_no_table_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load({"config": "nope.toml"}, {}, tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    with pytest.raises(ConfigError, match=r"no table \[tool.kernel-mcp\]"):
        load({"config": "pyproject.toml"}, {}, tmp_path)


@pytest.mark.parametrize(
    ("flags", "timeout_s", "most_s"),
    [
        ({}, 600, 3600),
        ({"timeout": "2s"}, 2, 2),
        ({"timeout": "2h"}, 7200, 7200),
        ({"timeout": "2s", "max-timeout": "1m"}, 2, 60),
        ({"timeout": "2m", "max-timeout": "1m"}, 60, 60),
        ({"max-timeout": "1m"}, 60, 60),
        ({"max-timeout": "1d"}, 600, 86400),
    ],
)
def test_the_longest_time_is_that_of_cells_unless_it_is_set(
    tmp_path: Path, flags: dict[str, str | list[str]], timeout_s: float, most_s: float
) -> None:
    settings = load(flags, {}, tmp_path)
    assert (settings.timeout_s, settings.max_timeout_s) == (timeout_s, most_s)


def test_variables_for_code_take_their_value_from_the_flag_or_the_server(tmp_path: Path) -> None:
    given = {"env": ["A", "B=x=y", "EMPTY=", "B=z"]}
    assert load(given, {"A": "hunter2"}, tmp_path).environ == (
        *(("A", "hunter2"), ("B", "z"), ("EMPTY", "")),
    )
    settings = load({}, {"KERNEL_MCP_ENV": "A", "A": "hunter2"}, tmp_path)
    assert settings.environ == (("A", "hunter2"),)
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    "entry",
    [
        *("=hunter2", "A-B=hunter2", "PATH=hunter2", "PYTHONPATH=hunter2", "LD_PRELOAD=hunter2"),
        *("KERNEL_MCP_X=hunter2", "HOME=hunter2", "JPY_PARENT_PID=hunter2", "A=hunter2\0"),
    ],
)
def test_an_error_about_a_variable_for_code_names_no_value(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"env = [{json.dumps(entry)}]")
    for flags, environ in (
        ({"env": [entry]}, {}),
        ({}, {"KERNEL_MCP_ENV": entry}),
        ({"config": str(file)}, {}),
    ):
        with pytest.raises(ConfigError) as refusal:
            load(flags, environ, tmp_path)
        assert "--env" in str(refusal.value)
        assert "hunter2" not in str(refusal.value)


def test_every_variable_that_a_kernel_has_of_its_own_is_refused(tmp_path: Path) -> None:
    for name in confine.environment(BootConfig(layers=("/layer",))):
        with pytest.raises(ConfigError, match=name):
            load({"env": [f"{name}=x"]}, {}, tmp_path)


def test_a_variable_that_the_server_lacks_is_an_error_as_are_endless_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--env MISSING: the server has no such variable"):
        load({"env": ["MISSING"]}, {"OTHER": "x"}, tmp_path)
    with pytest.raises(ConfigError, match="more than 16,384 characters"):
        load({"env": ["A=" + "x" * 17_000]}, {}, tmp_path)


def test_a_file_that_was_found_gives_code_no_variable(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text('env = ["SECRET"]')
    settings = load({}, {"SECRET": "hunter2"}, tmp_path)
    assert settings.environ == ()
    assert settings.ignored_keys is not None
    assert settings.ignored_keys.keys == ("env",)


def test_values_of_secrets_leave_the_environment_for_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIAL_KEY", "hunter2-hunter2")
    flags: dict[str, str | list[str]] = {"secret": ["TRIAL_KEY@a.test", "TRIAL_KEY@b.test:X-Key"]}
    settings = settings_from(flags)
    assert [(each.host, each.header, each.value) for each in settings.secrets] == [
        ("a.test", "Authorization", "hunter2-hunter2"),
        ("b.test", "X-Key", "hunter2-hunter2"),
    ]
    assert "TRIAL_KEY" not in os.environ
    assert "hunter2" not in repr(settings)
    with pytest.raises(ConfigError, match="no variable TRIAL_KEY; set it where"):
        settings_from(flags)
    with pytest.raises(ConfigError, match="leave one of the two out"):
        settings_from({**flags, "env": ["TRIAL_KEY=other"]})
    monkeypatch.setenv("TRIAL_KEY", "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        settings_from(flags)


def test_a_gpu_is_opened_with_its_devices_and_libraries(tmp_path: Path) -> None:
    settings = load({"gpu": "true", "device": ["/dev/null"]}, {}, tmp_path)
    devices = ["/dev/null", "/dev/nvidia0", "/dev/nvidiactl"]
    assert list(map(str, settings.devices)) == devices
    assert settings.mounts == (Mount(Path("/opt/driver/lib"), "/opt/driver/lib"),)
    assert settings.kernel_environment == (("LD_LIBRARY_PATH", "/opt/driver/lib"),)
    assert (settings.environ, settings.masked_values) == ((), ())
    assert not settings.limits.address_space
    assert load({}, {}, tmp_path).devices == ()
    again = load({"gpu": "true", "mount": ["/opt/driver/lib"]}, {}, tmp_path)
    assert len(again.mounts) == 1


@pytest.mark.parametrize("where", ["/", "..", "."])
def test_the_home_folder_is_not_shown_as_the_folder_of_a_client(where: str, tmp_path: Path) -> None:
    home = tmp_path / "home" / "me"
    (home / "project").mkdir(parents=True)
    environ, started = {"HOME": str(home)}, Path(os.path.normpath(home / where))
    found = load({"mount": [".", str(tmp_path / "data")]}, environ, started)
    assert [str(each.host) for each in found.mounts] == [str(tmp_path / "data")]
    assert f"--mount . shows nothing: {started} is, or holds, the home folder" in found.unmounted
    for flags in ({"mount": [".:rw"]}, {"mount": [str(started)]}):  # asked for: a sentence at start
        found = load(flags, environ, started)
        assert (len(found.mounts), found.unmounted) == (1, "")
    found = load({"mount": ["."]}, environ, home / "project")
    assert [str(each.host) for each in found.mounts] == [str(home / "project")]
    assert found.unmounted == ""


def test_libraries_that_every_sandbox_shows_are_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gpus.Driver((Path("/dev/dxg"),), Path("/usr/lib/wsl/lib"))
    monkeypatch.setattr(gpus, "driver", lambda: found)
    settings = load({"gpu": "true"}, {}, tmp_path)
    assert (settings.mounts, settings.driver) == ((), Path("/usr/lib/wsl/lib"))


@pytest.mark.parametrize("sandbox", ["landlock", "container"])
def test_a_gpu_is_refused_where_the_sandbox_cannot_give_it(tmp_path: Path, sandbox: str) -> None:
    with pytest.raises(ConfigError, match=f"--sandbox {sandbox}: .*Take --sandbox bwrap"):
        load({"gpu": "true", "sandbox": sandbox}, {}, tmp_path)
    load({"gpu": "true", "sandbox": "bwrap,landlock"}, {}, tmp_path)


@pytest.mark.parametrize("name", [*(each.name for each in OPTIONS), "config"])
def test_a_home_folder_that_nobody_has_is_nothing_but_a_mistake_in_any_option(
    name: str, tmp_path: Path
) -> None:
    for given in ("~no-such-user/place", ["~no-such-user/place"]):
        with suppress(ConfigError):
            load({name: given}, {}, tmp_path)


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ({}, (600.0,)),
        ({"ask": "off"}, ()),
        ({"ask": "90"}, (90.0,)),
        ({"http": "127.0.0.1:0"}, ()),
        ({"http": "127.0.0.1:0", "ask": "1m"}, (60.0,)),
        ({"http": "127.0.0.1:0", "tokens": "rows"}, (600.0,)),
    ],
)
def test_nobody_is_asked_over_http_unless_rows_or_a_flag_say_so(
    tmp_path: Path, flags: dict[str, str | list[str]], seconds: tuple[float, ...]
) -> None:
    settings = load(flags, {}, tmp_path)
    assert settings.ask == seconds
    assert restricted_to(settings, ()).ask == ()
    assert restricted_to(settings, ("ask",)).ask == seconds
