"""Changing what belongs to the host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.escape.attacks.table import Target, attack, refused


def _create(folder: str) -> bool:
    """Make a file and remove it. Without a sandbox only in folders for temporary files."""
    path = Path(folder, "written-by-an-attack")
    path.touch(exist_ok=False)
    path.unlink()
    return True


def _append_nothing(path: str) -> bool:
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    return True


@attack()
def write_to_the_root_folder(_: Target) -> bool:
    return _create("/")


@attack()
def write_to_usr(_: Target) -> bool:
    return _create("/usr/bin")


@attack()
def write_to_etc(_: Target) -> bool:
    return _create("/etc")


@attack("anyone")
def write_to_var_tmp(_: Target) -> bool:
    return _create("/var/tmp")


@attack()
def write_to_the_home_folder(target: Target) -> bool:
    return _create(str(Path(target.secret_home).parent))


@attack()
def write_beside_the_hosts_secret_in_tmp(target: Target) -> bool:
    return _append_nothing(target.secret_tmp)


@attack("root")
def change_the_account_file(_: Target) -> bool:
    return _append_nothing("/etc/passwd")


@attack()
def change_the_interpreter(target: Target) -> bool:
    return _append_nothing(os.path.realpath(target.interpreter))


@attack()
def change_the_boot_code(_: Target) -> bool:
    return _create("/opt/kernel_specs") or _append_nothing("/opt/kernel_specs/__init__.py")


@attack()
def put_bytecode_beside_the_boot_code(_: Target) -> bool:
    return _create("/opt/kernel_specs/restricted/__pycache__")


@attack("root")
def change_the_core_pattern(_: Target) -> bool:
    return _append_nothing("/proc/sys/kernel/core_pattern")


@attack("maybe")
def change_the_module_loader(_: Target) -> bool:
    return _append_nothing("/proc/sys/kernel/modprobe")


@attack("maybe")
def press_the_magic_key(_: Target) -> bool:
    return _append_nothing("/proc/sysrq-trigger")


@attack()
def raise_the_own_oom_protection(_: Target) -> bool:
    Path("/proc/self/oom_score_adj").write_text("-1000")
    return True


@attack()
def register_a_binary_format(_: Target) -> bool:
    return _append_nothing("/proc/sys/fs/binfmt_misc/register")


@attack()
def set_a_cgroup_release_agent(_: Target) -> bool:
    return any(_append_nothing(str(path)) for path in Path("/sys/fs/cgroup").rglob("release_agent"))


@attack()
def make_a_device_node(_: Target) -> bool:
    os.mknod("device", 0o20666, os.makedev(1, 1))
    return True


@attack()
def make_a_block_device_in_tmp(_: Target) -> bool:
    os.mknod("/tmp/device", 0o60666, os.makedev(254, 0))
    return True


@attack()
def gain_root_by_a_set_user_id_copy(_: Target) -> bool:
    shutil.copy("/usr/bin/id", "id")
    Path("id").chmod(0o6755)
    return subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip() == "0"


@attack()
def gain_root_by_a_set_user_id_program(_: Target) -> bool:
    done = subprocess.run(["su", "-c", "id -u"], capture_output=True, text=True, input="\n")
    return done.stdout.strip() == "0"


@attack()
def give_a_file_to_root(_: Target) -> bool:
    Path("gift").touch()
    os.chown("gift", 0, 0)
    return Path("gift").stat().st_uid == 0


@attack()
def use_the_swap_calls(target: Target) -> bool:
    return refused(target, "swapon", b"/workspace/swap", 0)


@attack()
def set_disk_quotas(target: Target) -> bool:
    return refused(target, "quotactl", -1, 0, 0, 0)


@attack()
def turn_on_accounting(target: Target) -> bool:
    return refused(target, "acct", 0)
