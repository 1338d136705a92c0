"""Why a sandbox does not start, and the command that helps."""

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

AS_ORDINARY_USER = (
    "Run the server as an ordinary user first of all (in a container: --user 1000, or USER in its "
    "file): a root server needs rights over the machine that containers withhold. "
)

_RESTRICTED_BY_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_USERNS_CLONE = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MAX_USERNS = Path("/proc/sys/user/max_user_namespaces")

_APPARMOR_PROFILE = (
    "printf 'abi <abi/4.0>,\\ninclude <tunables/global>\\n"
    "profile bwrap /usr/bin/bwrap flags=(unconfined) {\\n  userns,\\n}\\n' "
    "| sudo tee /etc/apparmor.d/bwrap && sudo apparmor_parser -r /etc/apparmor.d/bwrap"
)


def install_hint(package: str, release: Mapping[str, str] | None = None) -> str:
    """The command that installs a package on this distribution, and the way round it."""
    found = _release() if release is None else release
    names = [found.get("ID", ""), *found.get("ID_LIKE", "").split()]
    command = next((_INSTALL[name] for name in names if name in _INSTALL), None)
    if command is None:
        return f"Install the package {package} of your distribution. {AT_OWN_RISK}"
    return f"Install it with: sudo {command.format(package)}. {AT_OWN_RISK}"


def cannot_start(name: str, said: str) -> str:
    """Why the backend `name` starts no process; `said` is the start's output."""
    return f"the {name} sandbox cannot start a process here (it said: {_end(said)}). {AT_OWN_RISK}"


def diagnose(said: str) -> str:
    """Why bubblewrap starts no process, and the remedy; `said` is its output."""
    first = AS_ORDINARY_USER if os.geteuid() == 0 else ""
    return (
        f"bubblewrap cannot start a process here (it said: {_end(said)}). {first}{_remedy(said)} "
        f"{AT_OWN_RISK}"
    )


def _end(said: str) -> str:
    return " ".join(said.split())[-400:]


def _remedy(stderr: str) -> str:
    if _setting(_RESTRICTED_BY_APPARMOR) == "1":
        return (
            "AppArmor forbids unprivileged user namespaces on this system; allow them for "
            f"bubblewrap with: {_APPARMOR_PROFILE} (or for everything with: "
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)."
        )
    if _setting(_USERNS_CLONE) == "0":
        return (
            "Unprivileged user namespaces are switched off; allow them with: "
            "sudo sysctl -w kernel.unprivileged_userns_clone=1."
        )
    if _setting(_MAX_USERNS) == "0":
        return (
            "No user namespaces may be created; allow them with: "
            "sudo sysctl -w user.max_user_namespaces=15000."
        )
    if "proc" in stderr and "ermitted" in stderr:
        return (
            "The container this runs in hides parts of /proc; start it with "
            "--security-opt systempaths=unconfined (docker) or --security-opt unmask=ALL (podman)."
        )
    if "namespace" in stderr or "ermission" in stderr or "ermitted" in stderr:
        return (
            "The container or service manager this runs in forbids new namespaces; with docker or "
            "podman start it with --security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined --security-opt systempaths=unconfined, with systemd remove "
            "RestrictNamespaces=."
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
