"""Changing what belongs to the host, its user or another session."""

# ruff: noqa: PTH101, PTH102, PTH104, PTH108, PTH116, PTH120, PTH211

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

from tests.escape.landlock_attacks.toolkit import World, attack, call

GROUP = "file writes"


@attack(GROUP)
def write_a_file_of_the_user(world: World) -> bool:
    with open(world["victim_file"], "a") as file:
        return file.write("x") == 1


@attack(GROUP)
def truncate_a_file_of_the_user(world: World) -> bool:
    os.truncate(world["victim_file"], 0)
    return True


@attack(GROUP)
def remove_a_file_of_the_user(world: World) -> bool:
    os.unlink(world["removable"])
    return True


@attack(GROUP)
def create_a_file_beside(world: World) -> bool:
    return os.open(world["folder"] + "/new", os.O_CREAT | os.O_WRONLY) >= 0


@attack(GROUP)
def create_an_unnamed_file_beside(world: World) -> bool:
    return os.open(world["folder"], os.O_TMPFILE | os.O_RDWR) >= 0


@attack(GROUP)
def make_a_folder_beside(world: World) -> bool:
    os.mkdir(world["folder"] + "/made")
    return True


@attack(GROUP)
def plant_a_link(world: World) -> bool:
    os.symlink("/", world["folder"] + "/planted")
    return True


@attack(GROUP)
def plant_a_pipe(world: World) -> bool:
    os.mkfifo(world["folder"] + "/planted_pipe")
    return True


@attack(GROUP)
def plant_a_socket(world: World) -> bool:
    socket.socket(socket.AF_UNIX).bind(world["folder"] + "/socket")
    return True


@attack(GROUP)
def write_to_a_pipe_of_the_user(world: World) -> bool:
    return os.open(world["pipe"], os.O_RDWR | os.O_NONBLOCK) >= 0


@attack(GROUP)
def write_the_shared_folder_for_temporary_files(world: World) -> bool:
    path = f"/tmp/kernel-mcp-attack-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)
    return True


@attack(GROUP)
def fill_shared_memory(world: World) -> bool:
    path = f"/dev/shm/kernel-mcp-attack-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)
    return True


@attack(GROUP)
def change_the_mode_of_a_file(world: World) -> bool:
    os.chmod(world["victim_file"], 0o606)
    return os.stat(world["victim_file"]).st_mode & 0o777 == 0o606


@attack(GROUP)
def change_the_mode_of_a_readable_file_by_handle(world: World) -> bool:
    fd = os.open(world["package"], os.O_RDONLY)
    os.fchmod(fd, 0o606)
    return os.fstat(fd).st_mode & 0o777 == 0o606


@attack(GROUP)
def change_the_mode_by_the_newest_call(world: World) -> bool:
    call(452, -100, world["victim_file"].encode(), 0o616, 0)
    return os.stat(world["victim_file"]).st_mode & 0o777 == 0o616


@attack(GROUP)
def change_the_times_of_a_file(world: World) -> bool:
    os.utime(world["victim_file"], (1, 1))
    return os.stat(world["victim_file"]).st_mtime == 1


@attack(GROUP)
def change_the_owner_of_a_file(world: World) -> bool:
    os.chown(world["victim_file"], os.getuid(), os.getgid())
    return True


@attack(GROUP)
def set_an_extended_attribute(world: World) -> bool:
    os.setxattr(world["victim_file"], "user.planted", b"1")
    return True


@attack(GROUP)
def write_a_package(world: World) -> bool:
    return os.open(world["package"], os.O_WRONLY) >= 0


@attack(GROUP)
def add_a_module_to_the_packages(world: World) -> bool:
    path = os.path.dirname(world["package"]) + "/evil.py"
    return os.open(path, os.O_CREAT | os.O_WRONLY) >= 0


@attack(GROUP)
def link_a_package_into_the_workspace_and_write_it(world: World) -> bool:
    os.link(world["package"], world["workspace"] + "/package")
    return os.open(world["workspace"] + "/package", os.O_WRONLY) >= 0


@attack(GROUP)
def reopen_a_package_for_writing(world: World) -> bool:
    fd = os.open(world["package"], os.O_RDONLY)
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY) >= 0


@attack(GROUP)
def flag_a_package_through_its_handle(world: World) -> bool:
    fd = os.open(world["package"], os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, struct.pack("l", 0x80))  # FS_IOC_SETFLAGS, noatime
    return True


@attack(GROUP)
def set_the_version_of_a_package_through_its_handle(world: World) -> bool:
    fd = os.open(world["package"], os.O_RDONLY)
    return any(_version(fd, request) for request in (0x40087602, 0x40086604))


@attack(GROUP)
def set_the_version_of_a_file_outside(world: World) -> bool:
    return _version(os.open(world["victim_file"], 3), 0x40087602)


def _version(fd: int, request: int) -> bool:
    """FS_IOC_SETVERSION or EXT4_IOC_SETVERSION; a file system without versions says so."""
    try:
        fcntl.ioctl(fd, request, struct.pack("l", 4242))
    except OSError as error:
        return error.errno == errno.ENOTTY
    return True


@attack(GROUP)
def leave_a_set_user_id_program(world: World) -> bool:
    path = world["workspace"] + "/left"
    for make in (
        lambda: os.chmod(path, 0o4755),
        lambda: os.fchmod(os.open(path, os.O_RDONLY), 0o2755),
        lambda: os.open(path + "1", os.O_CREAT | os.O_WRONLY, 0o4755),
        lambda: os.mknod(path + "2", 0o104755),
        lambda: call(85, (path + "3").encode(), 0o4755),
        lambda: call(452, -100, path.encode(), 0o4755, 0),
    ):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o700))
        with contextlib.suppress(OSError):
            make()
    return any(entry.stat().st_mode & 0o6000 for entry in os.scandir(world["workspace"]))


@attack(GROUP)
def take_a_lease_on_a_package(world: World) -> bool:
    fcntl.fcntl(os.open(world["package"], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return True


@attack(GROUP)
def move_a_folder_of_the_workspace_out(world: World) -> bool:
    os.mkdir(world["workspace"] + "/out")
    os.rename(world["workspace"] + "/out", world["folder"] + "/out")
    return True


@attack(GROUP, works_unconfined=False)
def write_kernel_settings(world: World) -> bool:
    return os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY) >= 0


@attack(GROUP)
def write_own_score_of_the_memory_killer(world: World) -> bool:
    return os.open("/proc/self/oom_score_adj", os.O_WRONLY) >= 0


@attack(GROUP, works_unconfined=False)
def join_another_cgroup(world: World) -> bool:
    return os.open("/sys/fs/cgroup/cgroup.procs", os.O_WRONLY) >= 0


@attack(GROUP, works_unconfined=False)
def make_a_device(world: World) -> bool:
    os.mknod(world["workspace"] + "/disk", 0o60600, os.makedev(254, 0))
    return True
