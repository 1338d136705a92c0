"""A folder tree that behaves as the control groups of Linux do, as far as is used."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

V1_FILES = {
    "memory": {
        "memory.limit_in_bytes": "9223372036854771712",
        "memory.memsw.limit_in_bytes": "9223372036854771712",
        "memory.swappiness": "60",
        "memory.kmem.tcp.limit_in_bytes": "9223372036854771712",
        "memory.max_usage_in_bytes": "0",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "memory.stat": "cache 5\nrss 1\ntotal_rss 1000\ntotal_shmem 200\n",
    },
    "pids": {"pids.max": "max"},
    "cpu": {"cpu.shares": "1024", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "-1"},
    "cpuacct": {"cpuacct.usage": "1500000000"},
}
V2_FILES = {
    "memory": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.peak": "4096",
        "memory.events": "low 0\nmax 3\noom 1\noom_kill 1\n",
        "memory.stat": "anon 3000\nfile 999\nshmem 50\n",
    },
    "pids": {"pids.max": "max"},
    "cpu": {"cpu.max": "max 100000", "cpu.weight": "100"},
}


@dataclass
class FakeGroups:
    """Mounted trees below `root`; `controllers` says what each of their folders is for,
    `missing` which control files this system does not have.

    In version 2 a group has the files of a controller when the one above it passes that on, and
    refuses to pass anything on while it holds processes.
    """

    root: Path
    process: Path
    v1: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    v2: Path | None = None
    unwritable: set[Path] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)

    def mount_v1(self, *controllers: str, path: str = "/", shown: str = "") -> Path:
        """Mount a tree of version 1; the folder of the server's group."""
        point = self.root / ",".join(controllers)
        self.v1[point] = controllers
        point.mkdir(parents=True)
        own = point / (shown or path).lstrip("/")
        own.mkdir(parents=True, exist_ok=True)
        self.fill(own)
        self._tell(point, "cgroup", ",".join(controllers), f"4:{','.join(controllers)}:{path}")
        (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
        return own

    def mount_v2(self, controllers: str, path: str = "/", *, root: bool = False) -> Path:
        """Mount the tree of version 2; the folder of the server's group."""
        point = self.v2 = self.root / "unified"
        own = point / path.lstrip("/")
        own.mkdir(parents=True)
        (own / "cgroup.controllers").write_text(controllers)
        (own / "cgroup.subtree_control").write_text("")
        if not root:
            (own / "cgroup.type").write_text("domain\n")
        (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
        self._tell(point, "cgroup2", "", f"0::{path}")
        return own

    def fill(self, folder: Path) -> None:
        """Put the control files into a new group."""
        content = {"cgroup.procs": ""}
        if self.v2 is not None and folder.is_relative_to(self.v2):
            passed = (folder.parent / "cgroup.subtree_control").read_text().split()
            content |= {"cgroup.subtree_control": ""}
            content |= {"cgroup.type": "domain\n", "cpu.stat": "usage_usec 2500000\n"}
            self._offer(folder, passed)
        else:
            content |= {"tasks": ""}
            point = next(point for point in self.v1 if folder.is_relative_to(point))
            for name in self.v1[point]:
                content |= V1_FILES[name]
        for name, text in content.items():
            if name in self.missing:
                continue
            (folder / name).write_text(text)

    def make(self, folder: Path) -> None:
        if folder.parent in self.unwritable:
            raise PermissionError(13, "Permission denied", str(folder))
        folder.mkdir()
        self.fill(folder)

    def unmake(self, folder: Path) -> None:
        if not folder.exists():
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        if (folder / "cgroup.procs").read_text().split() or any(
            entry.is_dir() for entry in folder.iterdir()
        ):
            raise OSError(16, "Device or resource busy", str(folder))
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()

    def write(self, file: Path, value: int | str) -> None:
        if not file.exists():
            raise FileNotFoundError(2, "No such file or directory", str(file))
        if file.name == "cgroup.procs":
            for other in self.root.rglob("cgroup.procs"):
                if self._same_tree(other, file):
                    kept = [pid for pid in other.read_text().split() if pid != str(value)]
                    other.write_text("".join(f"{pid}\n" for pid in kept))
            value = f"{file.read_text()}{value}\n"
        elif file.name == "cgroup.subtree_control":
            value = self._passed_on(file, str(value))
            for below in file.parent.iterdir():
                if below.is_dir():
                    self._offer(below, value.split())
        file.write_text(str(value))

    def _offer(self, folder: Path, controllers: list[str]) -> None:
        (folder / "cgroup.controllers").write_text(" ".join(controllers))
        for controller in controllers:
            for name, text in V2_FILES[controller].items():
                (folder / name).write_text(text)

    def _passed_on(self, file: Path, change: str) -> str:
        group = file.parent
        passed = set(file.read_text().split())
        for word in change.split():
            if word[0] == "-":
                passed.discard(word[1:])
            elif word[1:] not in (group / "cgroup.controllers").read_text().split():
                raise FileNotFoundError(2, "No such file or directory", str(file))
            elif (group / "cgroup.procs").read_text() and (group / "cgroup.type").exists():
                raise OSError(16, "Device or resource busy", str(file))
            else:
                passed.add(word[1:])
        return " ".join(sorted(passed))

    def _same_tree(self, one: Path, other: Path) -> bool:
        points = [*self.v1, *([self.v2] if self.v2 else [])]
        return any(one.is_relative_to(point) and other.is_relative_to(point) for point in points)

    def _tell(self, point: Path, kind: str, options: str, group: str) -> None:
        mounts, groups = self.process / "mountinfo", self.process / "cgroup"
        line = f"36 25 0:32 / {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n"
        mounts.write_text((mounts.read_text() if mounts.exists() else "") + line)
        groups.write_text((groups.read_text() if groups.exists() else "") + f"{group}\n")
