"""The table of settings: its defaults hold together, and all that is made from it agrees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kernel_mcp.config.load import load, settings_parser
from kernel_mcp.config.options import Option
from kernel_mcp.config.settings import OPTIONS, Limits, Settings
from kernel_mcp.errors import ConfigError

FIXED = {
    "tool_servers",
    *("limits", "driver", "file", "ignored_keys", "unmounted", "tool_servers"),
    *("tmp_bytes", "open_files", "address_space"),
}
"""Fields that nobody sets."""
SAMPLES = {
    "NAME@HOST[:HEADER]": "KEY@api.test:X-Key",
    "GROUPS": "core,files",
    "CHARS": "2000",
    "off|auto": "off",
    "strict|guarded|default": "strict",
    "": "true",
    "DIR": "/d",
    "DIR|URL": "/w",
    "FILE": "/f",
    "N": "7",
    "NAME": "this",
    "NAMES": "rich",
    "SECONDS": "7",
    "SIZE": "3G",
    "TIME": "7s",
    "HOST:PORT": "127.0.0.1:8000",
    "NAME=N,...": "sessions=4,memory=2G",
    "ADDRESSES": "10.0.0.1,10.1.0.0/16",
    "HOST[:GUEST]": "data:/data",
    "HOST[:GUEST][:ro|rw][:strict]": "data:/data",
    "URL": "https://mirror.example/simple",
    "VERSION|PATH": "3.12",
    "NAME[=VALUE]": "NAME=VALUE",
}


def test_settings_and_limits_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout_s = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().pids = 1  # type: ignore[misc]


def test_the_defaults_fit_each_other() -> None:
    settings = Settings()
    assert settings.wait_s < settings.timeout_s < settings.idle_timeout_s
    assert settings.limits.tmp_bytes < settings.limits.memory_bytes


def test_every_field_has_its_flag() -> None:
    known = {each.name for table in (Settings, Limits) for each in dataclasses.fields(table)}
    assert {option.field for option in OPTIONS} == known - FIXED
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def value(settings: Settings, option: Option) -> object:
    holder = settings if hasattr(settings, option.field) else settings.limits
    return getattr(holder, option.field)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_setting_is_reached_by_flag_variable_and_key(option: Option, tmp_path: Path) -> None:
    text = SAMPLES.get(option.metavar) or option.metavar.split("|")[-1]
    words = [option.flag, text] if option.metavar else [option.flag]
    flags = vars(settings_parser("kernel-mcp", "", "").parse_args(words))
    (tmp_path / "named.toml").write_text(f'{option.name} = "{text}"\n')
    found = [
        value(load(flags, {}, tmp_path), option),
        value(load({}, {option.variable: text}, tmp_path), option),
        value(load({"config": "named.toml"}, {}, tmp_path), option),
    ]
    assert found == [found[0]] * 3
    assert found[0] != value(Settings(), option)


def test_sandboxes_are_tried_in_the_order_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "named.toml").write_text('sandbox = ["landlock", "bwrap"]\n')
    assert load({"config": "named.toml"}, {}, tmp_path).sandbox == ("landlock", "bwrap")
    assert load({"sandbox": " BWRAP ,landlock"}, {}, tmp_path).sandbox == ("bwrap", "landlock")
    for given in ("auto,landlock", "bwrap,none", "container,bwrap"):
        with pytest.raises(ConfigError, match="stands alone"):
            load({"sandbox": given}, {}, tmp_path)
    for given in ("", "bwrap,", "bwrap,docker"):
        with pytest.raises(ConfigError, match="expected auto, bwrap, landlock, container or none"):
            load({"sandbox": given}, {}, tmp_path)
