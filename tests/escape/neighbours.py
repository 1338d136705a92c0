"""One session attacks another, and the template that both come from.

`VICTIM` is what the other session runs. The attacks run in children of the attacker's kernel
process, so that its memory and descriptors are theirs too. Only the standard library is used.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import select
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.escape.attacks.table import Attack, attack

VICTIM = """
import ctypes, json, os, socket, threading
marker, name = {marker!r}, {name!r}
for path in ("/tmp/" + name, "/dev/shm/" + name, name):
    with open(path, "w") as file:
        os.fchmod(file.fileno(), 0o666)
        file.write(marker)
def serve(family, address):
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    def greet():
        while True:
            listener.accept()[0].sendall(marker.encode())
    threading.Thread(target=greet, daemon=True).start()
    return listener.getsockname()
port = serve(socket.AF_INET, ("127.0.0.1", 0))[1]
serve(socket.AF_UNIX, "\\0" + name)
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget({key}, 4096, 0o1666)
if segment != -1:  # a sandbox refuses it
    ctypes.memmove(libc.shmat(segment, None, 0), marker.encode(), len(marker))
queue = libc.msgget({key}, 0o1666)
libc.mq_open(("/" + name).encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
os.umask(0)
master, terminal = os.openpty()
os.chmod(os.ttyname(terminal), 0o666)
os.environ["SECRET"] = marker
print(json.dumps({{"port": port, "terminal": os.ttyname(terminal), "segment": segment}}))
"""


CLEANUP = """
for path in ("/tmp/" + name, "/dev/shm/" + name):
    os.unlink(path)
libc.shmctl(segment, 0, None)
libc.msgctl(queue, 0, None)
libc.mq_unlink(("/" + name).encode())
"""
"""Takes back what `VICTIM` has made, where it would outlive it."""


@dataclass(frozen=True)
class Neighbour:
    """The attacker's knowledge of the other session: more than it could ever find out.

    pid, init    its kernel and the init of its sandbox, as the host numbers them
    templates    the processes of the template
    workspace, sockets  its folders on the host
    key_digest   SHA-256 of the key of its connection file
    """

    marker: str
    name: str
    key: int
    port: int
    terminal: str
    segment: int
    pid: int
    init: int
    templates: list[int]
    workspace: str
    sockets: str
    key_digest: str

    @property
    def everyone(self) -> list[int]:
        return [self.pid, self.init, *self.templates]


def run(task: dict[str, Any], *, confined: bool) -> dict[str, str]:
    """The outcomes of the attacks on a neighbour: `ESCAPED …` or `held …`.

    Where nothing confines them only those are run that leave everything as it was: the others
    would change or unmount the machine's own folders and stop its processes.
    """
    neighbour = Neighbour(**task)
    return {
        one.name: outcome(one, neighbour)
        for one in attacks()
        if confined or one.control == "anyone"
    }


def outcome(one: Attack, neighbour: Neighbour) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            got = one.run(neighbour)  # type: ignore[arg-type]
            said = f"ESCAPED: {got!r}" if got else "held: nothing gained"
        except BaseException as error:  # noqa: BLE001  # whatever stops an attack stops it
            said = f"held: {type(error).__name__}: {error}"
        os.write(write, said[:2000].encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 20)
    if not ready:
        os.kill(child, signal.SIGKILL)
    said = os.read(read, 4096).decode() if ready else "held: it hung"
    os.close(read)
    os.waitpid(child, 0)
    return said or "held: it was killed"


def attacks() -> Iterator[Attack]:
    for name, function in list(globals().items()):
        if hasattr(function, "control"):
            yield Attack(name, "neighbours", function, function.control)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _libc(name: str, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(getattr(libc, name)(*arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


# Processes


@attack("anyone")
def signal_the_neighbour(them: Any) -> bool:
    os.kill(them.pid, 0)
    return True


@attack("anyone")
def signal_anyone_of_the_neighbour_or_the_template(them: Any) -> list[int]:
    return [pid for pid in them.everyone if _exists(pid)]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


@attack("anyone")
def find_a_process_of_another_session(them: Any) -> list[int]:
    """Every number there is, by signal and by /proc."""
    own = {1, os.getpid(), os.getppid(), *map(int, _listing(f"/proc/{os.getppid()}/task"))}
    found = {pid for pid in range(1, max(them.everyone) + 100) if _exists(pid)}
    found |= {int(name) for name in _listing("/proc") if name.isdigit()}
    return sorted(found - own)


@attack("anyone")
def see_the_neighbour_in_proc(them: Any) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in them.everyone)


@attack("anyone")
def hold_the_neighbour(them: Any) -> bool:
    return os.pidfd_open(them.pid) >= 0


@attack()
def trace_the_neighbour(them: Any) -> bool:
    return _libc("ptrace", 16, them.pid, 0, 0) == 0  # PTRACE_ATTACH


@attack("maybe")
def read_the_neighbours_memory(them: Any) -> bool:
    return any(_open(f"/proc/{pid}/mem", os.O_RDWR) for pid in them.everyone)


@attack()
def read_the_memory_of_the_init(_: Any) -> bool:
    return _open("/proc/1/mem", os.O_RDONLY)


@attack()
def write_the_memory_of_the_init(_: Any) -> bool:
    return _open("/proc/1/mem", os.O_RDWR)


@attack()
def look_through_the_init(_: Any) -> list[str]:
    found = []
    for name in ("root", "cwd", "exe", "fd", "environ", "map_files", "maps", "ns/mnt", "ns/user"):
        path = f"/proc/1/{name}"
        try:
            if name in ("fd", "map_files"):
                found += _listing(path)
            elif name in ("environ", "maps"):
                found += [Path(path).read_text()]
            else:
                found += [str(Path(path).readlink())]
        except OSError:
            continue
    return [one for one in found if one]


@attack()
def enter_the_namespaces_of_the_init(_: Any) -> bool:
    fd = os.pidfd_open(1)
    return any(
        _calls("setns", fd, flag)
        for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000, 0x8000000, 0x4000000)
    )


@attack()
def enter_any_namespace_of_proc(_: Any) -> bool:
    for pid in ("1", "self", str(os.getppid())):
        for name in ("mnt", "user", "pid", "net", "ipc", "uts", "cgroup"):
            try:
                fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            except OSError:
                continue
            if _calls("setns", fd, 0):
                return True
    return False


@attack()
def stop_the_init(_: Any) -> bool:
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
        os.kill(1, number)
    return _read("/proc/1/stat").rpartition(")")[2].split()[0] not in "SR"


@attack()
def kill_everyone(_: Any) -> bool:
    """As a process group of its own: what can be reached is only what this session started."""
    if os.fork() == 0:
        os.setsid()
        os.kill(os.getppid(), 0)
        os._exit(0)
    os.wait()
    return not Path("/proc/1").exists()


def _open(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def _calls(name: str, *arguments: Any) -> bool:
    try:
        _libc(name, *arguments)
    except OSError:
        return False
    return True


# Files


@attack("anyone")
def read_the_neighbours_workspace(them: Any) -> bool:
    return them.marker in _read(f"{them.workspace}/{them.name}")


@attack()
def find_the_neighbours_workspace_in_the_template(them: Any) -> list[str]:
    name = Path(them.workspace).name
    places = ("/sessions", "/sessions/0", "/sessions/1", "/workspace/..", "/run/kernel/..", "/run")
    found = [f"{place}/{entry}" for place in places for entry in _listing(place)]
    return [entry for entry in found if entry.endswith((name, Path(them.sockets).name))]


@attack()
def find_anything_in_the_shared_folders(_: Any) -> list[str]:
    return _listing("/sessions/0") + _listing("/sessions/1") + _listing("/packages/0")


@attack()
def climb_out_of_the_bound_folders(them: Any) -> bool:
    wanted = {Path(them.workspace).name, Path(them.sockets).name}
    for start in ("/workspace", "/run/kernel", "/tmp", "/dev/shm", "/proc/self/cwd"):
        fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(6):
            if wanted & set(_listing(f"/proc/self/fd/{fd}")):
                return True
            fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
    return False


def _listing(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []


@attack("anyone")
def read_the_neighbours_temporary_file(them: Any) -> bool:
    return them.marker in _read(f"/tmp/{them.name}")


@attack("anyone")
def read_the_neighbours_shared_memory_file(them: Any) -> bool:
    return them.marker in _read(f"/dev/shm/{them.name}")


@attack("anyone")
def read_the_neighbours_boot_files(them: Any) -> bool:
    return any(_read(f"{them.sockets}/{name}") for name in ("connection.json", "boot.json"))


@attack("anyone")
def connect_to_the_neighbours_channels(them: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{them.sockets}/k-1")
    return True


@attack("anyone")
def open_the_neighbours_terminal(them: Any) -> bool:
    return _open(them.terminal, os.O_RDWR | os.O_NOCTTY)


@attack()
def uncover_what_lies_beneath(_: Any) -> bool:
    places = ("/proc", "/tmp", "/dev/shm", "/dev/pts", "/workspace", "/run/kernel", "/sessions/0")
    return any(_calls("umount2", place.encode(), 2) for place in places)


@attack()
def bind_the_shared_folders_again(_: Any) -> bool:
    return any(
        _calls("mount", source.encode(), b"/workspace", b"", 4096, None)
        for source in ("/sessions/0", "/sessions", "/", "/proc/1/root")
    )


@attack()
def make_anything_writable_again(_: Any) -> bool:
    return any(
        _calls("mount", b"", place.encode(), b"", 4096 | 32, None)
        for place in ("/", "/usr", "/proc", "/dev", "/packages/0", "/opt")
    )


@attack()
def write_where_others_would_see_it(_: Any) -> list[str]:
    places = ("/", "/usr", "/opt", "/etc", "/run", "/dev", "/packages", "/sessions", "/proc")
    return [place for place in places if _open(f"{place}/x", os.O_CREAT | os.O_WRONLY)]


@attack()
def change_the_packages_of_the_environment(_: Any) -> bool:
    return _open(f"{Path(json.__file__).parent}/x.py", os.O_CREAT | os.O_WRONLY)


# Communication


@attack("anyone")
def connect_to_the_neighbours_abstract_socket(them: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{them.name}")
        return them.marker in client.recv(256).decode()


@attack("anyone")
def see_the_neighbours_abstract_socket(them: Any) -> bool:
    return them.name in _read("/proc/net/unix")


@attack("anyone")
def connect_to_the_neighbours_port(them: Any) -> bool:
    with socket.socket() as client:
        client.connect(("127.0.0.1", them.port))
        return them.marker in client.recv(256).decode()


@attack("anyone")
def attach_the_neighbours_segment(them: Any) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(_libc("shmget", them.key, 4096, 0o666), None, 0)
    return bool(ctypes.string_at(address, len(them.marker)) == them.marker.encode())


@attack("anyone")
def find_the_neighbours_message_queue(them: Any) -> bool:
    return _libc("msgget", them.key, 0o666) >= 0


@attack("anyone")
def open_the_neighbours_posix_queue(them: Any) -> bool:
    return _libc("mq_open", f"/{them.name}".encode(), os.O_RDWR) >= 0


@attack()
def bring_up_another_interface(_: Any) -> list[str]:
    return [name for _number, name in socket.if_nameindex() if name != "lo"]


# What a fork hands down


@attack()
def use_an_inherited_socket(_: Any) -> list[str]:
    """Any socket whose other end is not in this process, or that takes a packet."""
    return [link for fd, link in _descriptors() if link.startswith("socket:") and _leads_out(fd)]


def _leads_out(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.type in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            try:
                sock.send(b"packet", socket.MSG_DONTWAIT)
            except BrokenPipeError:  # the server's end takes nothing: its word comes over it
                return False
            return True
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = array.array("i", credentials)[0]
        # the server's end of a channel has a pid of 0: it is not of this namespace
        return pid not in (0, 1, os.getpid(), os.getppid()) and not _exists(pid)


@attack()
def hold_a_descriptor_of_another_process(_: Any) -> list[str]:
    return [link for _fd, link in _descriptors() if "pidfd" in link or link.startswith("mnt:")]


@attack()
def hold_a_folder_from_before_the_sandbox(_: Any) -> list[str]:
    found = []
    for fd, link in _descriptors():
        if stat.S_ISDIR(os.fstat(fd).st_mode) and not link.startswith("/proc"):
            found.append(link)
    return found


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in _listing("/proc/self/fd"):
        with suppress(OSError):
            yield int(name), str(Path(f"/proc/self/fd/{name}").readlink())


@attack()
def find_the_neighbours_key_in_memory(them: Any) -> bool:
    """Nothing of another session may be in the memory that all are forked from."""
    keys = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            if "r" not in rights or "[v" in line:
                continue
            start, end = (int(number, 16) for number in span.split("-"))
            memory.seek(start)
            try:
                content = memory.read(end - start)
            except OSError:
                continue
            for key in keys.findall(content):
                if hashlib.sha256(key).hexdigest() == them.key_digest:
                    return True
    return False


@attack()
def find_the_neighbours_marker_in_the_environment(them: Any) -> bool:
    return them.marker in _read("/proc/self/environ") or "SECRET" in os.environ


# Rights


@attack()
def hold_any_right(_: Any) -> list[str]:
    wanted = {"NoNewPrivs": "1", "Seccomp": "2"}
    found = []
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        value = value.strip()
        if name.startswith("Cap") and int(value, 16):
            found.append(line)
        if name in wanted and value != wanted[name]:
            found.append(line)
        if name in ("Uid", "Gid") and set(value.split()) != {"1000"}:
            found.append(line)
    return found


@attack()
def become_the_templates_root(_: Any) -> bool:
    return any(_calls(name, 0) for name in ("setuid", "setgid", "setfsuid") if name != "setfsuid")


@attack()
def make_a_user_namespace_below(_: Any) -> bool:
    return _calls("unshare", 0x10000000)


@attack()
def write_the_id_maps(_: Any) -> bool:
    return any(
        _open(f"/proc/{pid}/{name}", os.O_WRONLY)
        for pid in ("self", "1")
        for name in ("uid_map", "gid_map", "setgroups")
    )


@attack()
def start_more_processes_than_allowed(_: Any) -> bool:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    started: list[int] = []
    try:
        while len(started) <= limit:
            child = os.fork()
            if child == 0:
                signal.pause()
            started.append(child)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
        return False
    finally:
        for child in started:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return True


@attack()
def push_input_into_a_terminal(_: Any) -> bool:
    _master, terminal = os.openpty()
    fcntl.ioctl(terminal, 0x5412, b"x")  # TIOCSTI
    return True
