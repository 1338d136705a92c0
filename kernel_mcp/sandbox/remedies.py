"""Messages about why a sandbox does not start, with the command that helps."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

_INSTALL = {
    "debian": "apt-get install -y {}",
    "ubuntu": "apt-get install -y {}",
    "fedora": "dnf install -y {}",
    "rhel": "dnf install -y {}",
    "centos": "dnf install -y {}",
    "suse": "zypper install -y {}",
    "opensuse": "zypper install -y {}",
    "arch": "pacman -S --noconfirm {}",
    "alpine": "apk add {}",
}
AT_OWN_RISK = "`--sandbox none` runs kernels without any confinement, at your own risk."

_MARKS = {"podman": Path("/run/.containerenv"), "docker": Path("/.dockerenv")}
_OPTIONS = {
    "podman": "--user 1000 --security-opt seccomp=unconfined --security-opt unmask=ALL",
    "docker": "--user 1000 --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined",
}
"""Options with which an ordinary user can make namespaces in a container; root needs more."""
_NARROWER = (
    "docs/deploy.md has a seccomp profile that permits less than `unconfined`, and the options of "
    "Kubernetes."
)
_SYSTEMD = Path("/run/systemd/system")
_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")
_OSRELEASE = Path("/proc/sys/kernel/osrelease")

_RESTRICTED_BY_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_USERNS_CLONE = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MAX_USERNS = Path("/proc/sys/user/max_user_namespaces")

_APPARMOR_PROFILE = (
    "printf 'abi <abi/4.0>,\\ninclude <tunables/global>\\n"
    "profile bwrap /usr/bin/bwrap flags=(unconfined) {\\n  userns,\\n}\\n' "
    "| sudo tee /etc/apparmor.d/bwrap && sudo apparmor_parser -r /etc/apparmor.d/bwrap"
)


def container() -> str:
    """Return `podman` or `docker` if this process runs in a container of theirs, else "".

    podman creates no marker file in a read-only root file system, but sets a variable.
    """
    named = os.environ.get("container", "")  # noqa: SIM112
    if named in _MARKS:
        return named
    return next((engine for engine, mark in _MARKS.items() if mark.exists()), "")


def surroundings() -> str:
    """Return the user and the environment of this process as a phrase."""
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}, without privileges"
    if engine := container():
        return f"{user}, in a container of {engine}"
    return f"{user}, under WSL" if "microsoft" in _setting(_OSRELEASE).lower() else user


def for_cgroups() -> str:
    """Return how to give this server control groups, and which limits apply without them."""
    if container():
        return (
            "for limits by control groups start the container with --memory, --cpus and "
            "--pids-limit; those of each session are held by a watchdog"
        )
    if os.geteuid() and _UNIFIED.exists() and _SYSTEMD.exists():
        return (
            "for limits by control groups start the server with: systemd-run --user --scope "
            "--quiet -p Delegate=yes kernel-mcp"
        )
    return (
        "control groups take a server that root runs, or systemd with cgroups of version 2; "
        "without them limits of processes and a watchdog hold"
    )


def install_hint(package: str, release: Mapping[str, str] | None = None) -> str:
    """Return the command that installs a package on this distribution, and the alternative."""
    found = _release() if release is None else release
    names = [found.get("ID", ""), *found.get("ID_LIKE", "").split()]
    command = next((_INSTALL[name] for name in names if name in _INSTALL), None)
    if command is None:
        return f"Install the package {package} of your distribution. {AT_OWN_RISK}"
    return f"Install it with: {_as_root(command.format(package))}. {AT_OWN_RISK}"


def cannot_start(name: str, said: str) -> str:
    """Return why the backend `name` starts no process; `said` is the output of the start."""
    return f"the {name} sandbox cannot start a process here (it said: {_end(said)}). {AT_OWN_RISK}"


def diagnose(said: str) -> str:
    """Return why bubblewrap starts no process, and the remedy; `said` is its output."""
    return (
        f"bubblewrap cannot start a process here (it said: {_end(said)}). {_remedy(said)} "
        f"{AT_OWN_RISK}"
    )


def _as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"


def _end(said: str) -> str:
    return " ".join(said.split())[-400:]


def _remedy(stderr: str) -> str:
    where = " on the host" if container() else ""
    if _setting(_RESTRICTED_BY_APPARMOR) == "1" and os.geteuid():
        return (
            "AppArmor forbids unprivileged user namespaces on this system; allow them for "
            f"bubblewrap{where} with: {_APPARMOR_PROFILE} (or for everything with: "
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)."
        )
    if _setting(_USERNS_CLONE) == "0" and os.geteuid():
        return (
            f"Unprivileged user namespaces are switched off; allow them{where} with: "
            "sudo sysctl -w kernel.unprivileged_userns_clone=1."
        )
    if _setting(_MAX_USERNS) == "0" and os.geteuid():
        return (
            f"No user namespaces may be created; allow them{where} with: "
            "sudo sysctl -w user.max_user_namespaces=15000."
        )
    if engine := container():
        return f"Start the container with {_OPTIONS[engine]}. {_NARROWER}"
    if any(word in stderr for word in ("namespace", "ermission", "ermitted")):
        options = "; ".join(f"with {engine}: {words}" for engine, words in _OPTIONS.items())
        return (
            "What this runs in forbids new namespaces. A service of systemd must not have "
            f"RestrictNamespaces=; a container has to be started, {options}. {_NARROWER}"
        )
    return "Try the same as another user or update bubblewrap."


def _setting(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _release() -> Mapping[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}
