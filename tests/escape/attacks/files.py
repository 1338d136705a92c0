"""Reading what belongs to the host."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from pathlib import Path

from tests.escape.attacks.table import Target, attack, refused, syscall


@attack("root")
def read_the_shadow_file(_: Target) -> bool:
    return bool(Path("/etc/shadow").read_text())


@attack("anyone")
def read_a_file_in_the_home_folder(target: Target) -> bool:
    return target.marker in Path(target.secret_home).read_text()


@attack("anyone")
def list_the_home_folder(target: Target) -> bool:
    return Path(target.secret_home) in Path(target.secret_home).parent.iterdir()


@attack("anyone")
def read_a_file_in_the_hosts_tmp(target: Target) -> bool:
    return target.marker in Path(target.secret_tmp).read_text()


@attack("anyone")
def read_the_hosts_shared_memory(target: Target) -> bool:
    return target.marker in Path(target.secret_shm).read_text()


@attack("anyone")
def read_through_the_root_of_any_process(target: Target) -> bool:
    return any(
        target.marker in _read(f"/proc/{pid}/root{target.secret_tmp}") for pid in _processes()
    )


@attack("anyone")
def read_through_the_folder_of_any_process(target: Target) -> bool:
    name = target.secret_tmp.lstrip("/")
    return any(
        target.marker in _read(f"/proc/{pid}/cwd/{'../' * depth}{name}")
        for pid in _processes()
        for depth in (0, 1, 2, 3, 8)
    )


@attack("anyone")
def read_through_a_symlink_in_the_workspace(target: Target) -> bool:
    link = Path("link-to-secret")
    link.symlink_to(target.secret_tmp)
    try:
        return target.marker in link.read_text()
    finally:
        link.unlink()


@attack("anyone")
def climb_out_of_the_workspace_with_dots(target: Target) -> bool:
    return target.marker in Path("../" * 30 + target.secret_tmp.lstrip("/")).read_text()


@attack()
def link_a_host_file_into_the_workspace(_: Target) -> bool:
    os.link("/usr/bin/env", "linked")
    return True


@attack()
def read_through_an_inherited_descriptor(target: Target) -> bool:
    for fd in range(3, 256):
        try:
            opened = os.open(f"..{target.secret_tmp}", os.O_RDONLY, dir_fd=fd)
        except OSError:
            continue
        os.close(opened)
        return True
    return False


@attack("anyone")
def read_the_servers_environment(target: Target) -> bool:
    return any(target.marker in _read(f"/proc/{pid}/environ") for pid in _processes())


@attack()
def find_the_marker_in_the_own_environment(target: Target) -> bool:
    return target.marker in repr(os.environ)


@attack()
def find_secrets_in_any_command_line(target: Target) -> bool:
    return any(target.marker in _read(f"/proc/{pid}/cmdline") for pid in _processes())


@attack("maybe")
def read_a_block_device(_: Target) -> bool:
    for path in Path("/dev").iterdir():
        if stat.S_ISBLK(path.lstat().st_mode):
            with path.open("rb") as device:
                return len(device.read(512)) == 512
    return False


@attack()
def read_physical_memory(_: Target) -> bool:
    return bool(_read_bytes("/dev/mem") or _read_bytes("/proc/kcore") or _read_bytes("/dev/port"))


@attack("maybe")
def read_kernel_addresses(_: Target) -> bool:
    with open("/proc/kallsyms") as file:
        return any(int(line.split()[0], 16) for line in file)


@attack()
def read_the_kernel_log(target: Target) -> bool:
    if _read_bytes("/dev/kmsg") or _read_bytes("/proc/kmsg"):
        return True
    return syscall(target, "syslog", 10, 0, 0) >= 0


@attack("anyone")
def read_the_boot_command_line(_: Target) -> bool:
    return bool(_read("/proc/cmdline").strip())


@attack()
def read_keys_of_the_host(_: Target) -> bool:
    return bool(_read_bytes("/proc/keys"))


@attack("anyone")
def look_into_sys(_: Target) -> bool:
    return any(Path("/sys/class").iterdir())


@attack()
def talk_to_a_container_daemon(_: Target) -> bool:
    for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/podman/podman.sock"):
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(path) == 0:
                return True
    return False


@attack()
def open_a_file_by_its_handle(target: Target) -> bool:
    return refused(target, "open_by_handle_at", -1, -1, 0)


@attack()
def ask_for_a_file_handle(target: Target) -> bool:
    buffer = ctypes.create_string_buffer(256)
    return refused(target, "name_to_handle_at", -100, b"/usr", ctypes.addressof(buffer), 0, 0)


@attack()
def watch_the_whole_filesystem(target: Target) -> bool:
    return refused(target, "fanotify_init", 0, 0)


@attack("anyone")
def list_another_sessions_workspace(target: Target) -> bool:
    return any(Path(target.other_workspace).iterdir())


def _processes() -> list[str]:
    return ["self", *(entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit())]


def _read(path: str) -> str:
    return _read_bytes(path).decode("utf-8", "replace")


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            os.set_blocking(file.fileno(), False)
            return file.read(4096) or b""
    except OSError:
        return b""
