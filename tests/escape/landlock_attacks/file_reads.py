"""Reading what belongs to the host, its user or another session."""

# ruff: noqa: PTH104, PTH119, PTH120, PTH208, PTH211

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess

from tests.escape.landlock_attacks.toolkit import World, attack, call, content

GROUP = "file reads"


@attack(GROUP)
def read_a_file_of_the_user(world: World) -> bool:
    return b"secret" in content(world["secret"])


@attack(GROUP)
def list_a_folder_of_the_user(world: World) -> bool:
    return bool(os.listdir(world["folder"]))


@attack(GROUP)
def read_through_a_link_in_the_workspace(world: World) -> bool:
    os.symlink(world["secret"], world["workspace"] + "/link")
    return b"secret" in content(world["workspace"] + "/link")


@attack(GROUP)
def read_through_dot_dot(world: World) -> bool:
    depth = "/.." * world["workspace"].count("/")
    return b"secret" in content(world["workspace"] + depth + world["secret"])


@attack(GROUP)
def read_through_proc_self_root(world: World) -> bool:
    return b"secret" in content("/proc/self/root" + world["secret"])


@attack(GROUP)
def read_through_the_root_of_another_process(world: World) -> bool:
    return b"secret" in content(f"/proc/{world['victim']}/root{world['secret']}")


@attack(GROUP)
def read_through_a_changed_directory(world: World) -> bool:
    os.chdir(os.path.dirname(world["secret"]))
    return b"secret" in content(os.path.basename(world["secret"]))


@attack(GROUP)
def reopen_a_path_handle(world: World) -> bool:
    handle = os.open(world["secret"], os.O_PATH)
    return b"secret" in content(f"/proc/self/fd/{handle}")


@attack(GROUP)
def map_a_file(world: World) -> bool:
    fd = os.open(world["secret"], os.O_RDONLY)
    return b"secret" in mmap.mmap(fd, 0, prot=mmap.PROT_READ)[:]


@attack(GROUP)
def read_in_a_child_process(world: World) -> bool:
    return b"secret" in subprocess.run(["cat", world["secret"]], capture_output=True).stdout


@attack(GROUP)
def read_as_a_program_from_memory(world: World) -> bool:
    fd = os.memfd_create("cat")
    os.write(fd, content(shutil.which("cat") or "/bin/cat"))
    command = [f"/proc/self/fd/{fd}", world["secret"]]
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        os.execve(fd, command, {})
    os.close(write)
    return b"secret" in os.read(read, 100)


@attack(GROUP)
def hard_link_a_file_into_the_workspace(world: World) -> bool:
    os.link(world["secret"], world["workspace"] + "/hard")
    return b"secret" in content(world["workspace"] + "/hard")


@attack(GROUP)
def rename_a_file_into_the_workspace(world: World) -> bool:
    os.rename(world["movable"], world["workspace"] + "/moved")
    return True


@attack(GROUP)
def exchange_a_file_with_one_of_the_workspace(world: World) -> bool:
    own = world["workspace"] + "/own"
    with open(own, "w"):
        pass
    call(316, -100, world["movable"].encode(), -100, own.encode(), 2)
    return True


@attack(GROUP)
def read_the_workspace_of_another_session(world: World) -> bool:
    return b"neighbour" in content(world["neighbour"])


@attack(GROUP)
def read_shared_memory_of_the_user(world: World) -> bool:
    return b"secret" in content(world["shared_memory"])


@attack(GROUP)
def list_shared_memory(world: World) -> bool:
    return bool(os.listdir("/dev/shm"))


@attack(GROUP)
def list_the_shared_folder_for_temporary_files(world: World) -> bool:
    return bool(os.listdir("/tmp"))


@attack(GROUP)
def read_the_passwd_database(world: World) -> bool:
    return b"root" in content("/etc/passwd")


@attack(GROUP, works_unconfined=False)
def read_the_password_hashes(world: World) -> bool:
    return bool(content("/etc/shadow"))


@attack(GROUP)
def read_the_environment_of_another_process(world: World) -> bool:
    return b"VICTIM_TOKEN" in content(f"/proc/{world['victim']}/environ")


@attack(GROUP)
def read_the_command_line_of_another_process(world: World) -> bool:
    return bool(content(f"/proc/{world['victim']}/cmdline"))


@attack(GROUP)
def list_processes(world: World) -> bool:
    return bool(os.listdir("/proc"))


@attack(GROUP)
def read_the_mount_table(world: World) -> bool:
    return bool(content("/proc/self/mountinfo"))


@attack(GROUP)
def read_the_network_tables(world: World) -> bool:
    return bool(content("/proc/self/net/tcp"))


@attack(GROUP)
def read_kernel_symbols(world: World) -> bool:
    return bool(content("/proc/kallsyms")[:10])


@attack(GROUP)
def list_network_interfaces_in_sys(world: World) -> bool:
    return bool(os.listdir("/sys/class/net"))


@attack(GROUP)
def watch_a_folder_with_inotify(world: World) -> bool:
    return call(254, call(294, 0), world["folder"].encode(), 0xFFF) >= 0


@attack(GROUP)
def find_a_file_by_opening_it_for_nothing(world: World) -> bool:
    return os.open(world["secret"], 3) >= 0


@attack(GROUP)
def use_up_the_watches_of_the_user(world: World) -> bool:
    return call(294, 0) >= 0


@attack(GROUP)
def read_an_extended_attribute(world: World) -> bool:
    return os.getxattr(world["attributed"], "user.note") == b"secret"


@attack(GROUP, works_unconfined=False)
def open_a_file_by_its_handle(world: World) -> bool:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    mount = ctypes.c_int()
    call(303, -100, world["secret"].encode(), handle, ctypes.byref(mount), 0)
    call(304, os.open(world["workspace"], os.O_RDONLY), handle, os.O_RDONLY)
    return True


@attack(GROUP, works_unconfined=False)
def read_a_disk(world: World) -> bool:
    return any(content(f"/dev/{name}")[:1] for name in ("vda", "sda", "nvme0n1", "mem"))


@attack(GROUP)
def open_a_terminal(world: World) -> bool:
    return os.open("/dev/ptmx", os.O_RDWR) >= 0


@attack(GROUP)
def open_a_terminal_for_nothing(world: World) -> bool:
    return os.open("/dev/ptmx", 3) >= 0
