"""Which devices of the host code may use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders import Device, usable_devices

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="makes device files, as root alone may")


def refusal(path: str | Path, folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        usable_devices([Path(path)], folder, "bwrap")
    assert str(error.value).startswith(f"--device {path}: ")
    return str(error.value)


@pytest.mark.parametrize("name", ["null", "zero", "full", "random", "urandom"])
def test_devices_that_every_kernel_has_are_taken_as_they_are(name: str, tmp_path: Path) -> None:
    path = Path("/dev", name)
    assert usable_devices([path, path], tmp_path, "bwrap") == (Device(path, str(path)),)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev", "it is a folder: name each device"),
        ("/etc/passwd", "it is no device"),
        ("/dev/missing", "it cannot be had: No such file"),
        ("/dev/tty", "a terminal"),
        ("/dev/ptmx", "a terminal"),
        ("/dev/stdin", "name the device itself"),
        ("/dev/../etc/passwd", "it is a link"),
    ],
)
def test_what_is_no_device_or_somebody_elses_is_refused(
    path: str, words: str, tmp_path: Path
) -> None:
    assert words in refusal(path, tmp_path)


@pytest.mark.parametrize(
    ("kind", "major", "minor", "words"),
    [
        (stat.S_IFBLK, 7, 0, "a block device"),
        (stat.S_IFCHR, 1, 1, "memory or the log"),
        (stat.S_IFCHR, 1, 4, "memory or the log"),
        (stat.S_IFCHR, 1, 11, "memory or the log"),
        (stat.S_IFCHR, 4, 1, "a terminal"),
        (stat.S_IFCHR, 5, 1, "a terminal"),
        (stat.S_IFCHR, 5, 2, "a terminal"),
        (stat.S_IFCHR, 7, 1, "the screen"),
        (stat.S_IFCHR, 10, 237, "disks of the host"),
        (stat.S_IFCHR, 13, 64, "keyboards"),
        (stat.S_IFCHR, 21, 0, "a disk"),
        (stat.S_IFCHR, 136, 0, "a terminal"),
        (stat.S_IFCHR, 202, 0, "registers"),
    ],
)
@AS_ROOT
def test_a_refused_device_is_known_by_its_number_whatever_its_name(
    kind: int, major: int, minor: int, words: str, tmp_path: Path
) -> None:
    path = Path(f"/dev/kmtest-{os.getpid()}")
    os.mknod(path, 0o666 | kind, os.makedev(major, minor))
    try:
        assert words in refusal(path, tmp_path)
    finally:
        path.unlink()


@AS_ROOT
def test_a_device_outside_of_dev_and_a_link_to_one_are_refused(tmp_path: Path) -> None:
    os.mknod(tmp_path / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    assert "outside of /dev" in refusal(tmp_path / "zero", tmp_path)
    (tmp_path / "link").symlink_to("/dev/zero")
    assert "name the device itself, /dev/zero" in refusal(tmp_path / "link", tmp_path)


@AS_ROOT
def test_kernels_of_a_root_server_get_a_copy_of_what_only_root_may_open(tmp_path: Path) -> None:
    path = Path(f"/dev/kmtest-{os.getpid()}")
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    path.chmod(0o600)
    try:
        (copied,) = usable_devices([path], tmp_path, "bwrap")
        with pytest.raises(ConfigError, match=r"mode is 0600\. Allow it with `chmod o\+rw /dev/km"):
            usable_devices([path], tmp_path, "landlock")
        path.chmod(0o604)
        (shown,) = usable_devices([path], tmp_path, "landlock")
        (free,) = usable_devices([path], tmp_path, "none")
    finally:
        path.unlink()
    info = copied.source.stat()
    assert copied.source.parent == tmp_path
    assert (info.st_rdev, stat.S_IMODE(info.st_mode)) == (os.makedev(1, 5), 0o666)
    assert copied == Device(copied.source, str(path))
    assert shown.source == path
    assert str(shown).endswith("its mode is 0604")
    assert free == Device(path, str(path))
