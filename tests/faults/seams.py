"""The seams to the system: calls of kernel_mcp that concern files, descriptors, threads, processes.

They are found in the source. Each name that is found has to stand in `SEAMS`, whose calls the
harness makes fail, or in `HARMLESS`, which says why it does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "kernel_mcp"

SYSTEM_MODULES = (
    "os",
    "socket",
    "fcntl",
    "select",
    "signal",
    "subprocess",
    "shutil",
    "tempfile",
    "mmap",
    "ctypes",  # none of it is harmless: the server calls Linux by kernel_specs.linux
    "resource",
    "threading",
    "concurrent.futures",
    "anyio.to_thread",
    "anyio.open_file",
    "anyio.open_process",
    "anyio.open_signal_receiver",
    "anyio.wait_readable",
    "anyio.wait_writable",
    "asyncio.create_subprocess_exec",
    "asyncio.to_thread",
    "kernel_specs.linux",
    "kernel_specs.template.packets",
)
"""A call of anything in these reaches the system, unless it is harmless."""
METHODS = frozenset(
    [
        "accept",
        "bind",
        "chmod",
        "chown",
        "connect",
        "connect_read_pipe",
        "connect_write_pipe",
        "exists",
        "expanduser",
        "getpeername",
        "getsockopt",
        "glob",
        "hardlink_to",
        "is_dir",
        "is_file",
        "is_fifo",
        "is_mount",
        "is_socket",
        "is_symlink",
        "iterdir",
        "lchmod",
        "link_to",
        "listen",
        "lstat",
        "mkdir",
        "open",
        "read_bytes",
        "read_text",
        "readlink",
        "recv",
        "recv_into",
        "recvmsg",
        "recvmsg_into",
        "rename",
        "rglob",
        "rmdir",
        "run_sync",
        "samefile",
        "send",
        "send_bytes",
        "sendall",
        "sendmsg",
        "setblocking",
        "setsockopt",
        "stat",
        "submit",
        "symlink_to",
        "touch",
        "truncate",
        "unlink",
        "write_bytes",
        "write_text",
        "add_reader",
    ]
)
"""Methods of paths, sockets, executors and the event loop that do, whoever has them."""

HARMLESS = frozenset(
    [
        "os.fsencode",
        "os.fsdecode",
        "os.fspath",
        "os.path.samestat",
        "os.strerror",
        "os.getpid",
        "os.getppid",
        "os.geteuid",
        "os.getuid",
        "os.getgid",
        "os.getegid",
        "os.cpu_count",
        "os.path.realpath",
        "os.path.commonpath",
        "os.path.basename",
        "os.path.dirname",
        "os.path.join",
        "os.path.normpath",
        "os.path.splitext",
        "os.path.abspath",
        "os.path.expanduser",
        "os.path.isabs",
        "os.waitstatus_to_exitcode",
        "os.environ.get",
        "os.environ.copy",
        "os.environ.items",
        "os.environ.setdefault",
        "os.environ.update",
        "os.environ.pop",
        "os.get_exec_path",
        "os.sysconf",
        "os.major",
        "os.minor",
        "os.makedev",
        "os.WIFSTOPPED",
        "os.WSTOPSIG",
        "os.WIFEXITED",
        "os.getgroups",
        "os.getsid",
        "os.path.lexists",
        "os.path.exists",  # these four answer False where the system refuses
        "os.path.isdir",
        "os.path.isfile",
        "os.path.islink",
        "os.path.relpath",
        "os.pathsep.join",
        "os.set_blocking",
        "os.access",
        "os._exit",
        "os.umask",
        "os.uname",
        "os.nice",
        "os.setpriority",
        "kernel_specs.linux.malloc_trim",
        "kernel_specs.linux.mallopt",
        "signal.Signals",
        "signal.strsignal",
        "signal.set_wakeup_fd",
        "signal.setitimer",
        "signal.signal",
        "signal.getsignal",
        "signal.raise_signal",
        "socket.CMSG_SPACE",
        "socket.CMSG_LEN",
        "socket.gethostname",
        "socket.inet_aton",
        "socket.ntohs",
        "threading.Lock",
        "threading.RLock",
        "threading.Event",
        "threading.Semaphore",
        "threading.current_thread",
        "threading.get_ident",
        "threading.main_thread",
        "concurrent.futures.Future",
        "concurrent.futures.ThreadPoolExecutor",
        "signal.pthread_sigmask",
        "signal.siginterrupt",
        "signal.valid_signals",
        "shutil.get_terminal_size",
        "tempfile.gettempdir",
        "shutil.which",
        "resource.getrlimit",
    ]
)
"""Names of these modules that ask nothing of the system, or whose failure ends a start in words."""

SEAMS = frozenset(
    [
        ".accept",
        ".add_reader",
        ".bind",
        ".chmod",
        ".connect",
        ".connect_read_pipe",
        ".connect_write_pipe",
        ".exists",
        ".expanduser",
        ".getsockopt",
        ".glob",
        ".is_dir",
        ".is_file",
        ".is_symlink",
        ".iterdir",
        ".listen",
        ".lstat",
        ".mkdir",
        ".open",
        ".read_bytes",
        ".read_text",
        ".readlink",
        ".recv",
        ".recv_into",
        ".recvmsg",
        ".rename",
        ".rglob",
        ".rmdir",
        ".send",
        ".sendall",
        ".sendmsg",
        ".setblocking",
        ".setsockopt",
        ".stat",
        ".submit",
        ".symlink_to",
        ".touch",
        ".unlink",
        ".write_bytes",
        ".write_text",
        "anyio.open_file",
        "anyio.open_process",
        "asyncio.create_subprocess_exec",
        "anyio.open_signal_receiver",
        "anyio.to_thread.run_sync",
        "anyio.wait_readable",
        "anyio.wait_writable",
        "fcntl.fcntl",
        "fcntl.flock",
        "fcntl.ioctl",
        "kernel_specs.linux.birth_time",
        "kernel_specs.linux.clear_capabilities",
        "kernel_specs.linux.close_all",
        "kernel_specs.linux.close_range",
        "kernel_specs.linux.exchange",
        "kernel_specs.linux.fanotify_init",
        "kernel_specs.linux.fanotify_mark",
        "kernel_specs.linux.file_handle",
        "kernel_specs.linux.inotify_add_watch",
        "kernel_specs.linux.inotify_init",
        "kernel_specs.linux.inotify_rm_watch",
        "kernel_specs.linux.mount",
        "kernel_specs.linux.move_mount",
        "kernel_specs.linux.open_tree",
        "kernel_specs.linux.openat2",
        "kernel_specs.linux.prctl",
        "kernel_specs.linux.send_listeners",
        "kernel_specs.linux.set_attributes",
        "kernel_specs.linux.set_name",
        "kernel_specs.linux.setfsgid",
        "kernel_specs.linux.setfsuid",
        "kernel_specs.linux.setns",
        "kernel_specs.linux.shortest_turns",
        "kernel_specs.linux.timer_create",
        "kernel_specs.linux.timer_set",
        "kernel_specs.linux.unshare",
        "kernel_specs.template.packets.receive",
        "kernel_specs.template.packets.send",
        "mmap.mmap",
        "open",
        "os.chdir",
        "os.chmod",
        "os.chown",
        "os.close",
        "os.closerange",
        "os.dup",
        "os.dup2",
        "os.execv",
        "os.fchmod",
        "os.fchown",
        "os.fdopen",
        "os.fork",
        "os.fstat",
        "os.fsync",
        "os.ftruncate",
        "os.getxattr",
        "os.kill",
        "os.link",
        "os.killpg",
        "os.listdir",
        "os.lseek",
        "os.lstat",
        "os.memfd_create",
        "os.mkdir",
        "os.mknod",
        "os.open",
        "os.pidfd_open",
        "os.pipe",
        "os.pipe2",
        "os.posix_fallocate",
        "os.pread",
        "os.pwrite",
        "os.read",
        "os.readlink",
        "os.readv",
        "os.removexattr",
        "os.rename",
        "os.rmdir",
        "os.fwalk",
        "os.scandir",
        "shutil.copyfileobj",
        "os.setxattr",
        "os.splice",
        "os.sched_param",
        "os.sched_setscheduler",
        "os.setgroups",
        "os.setresgid",
        "os.setresuid",
        "os.stat",
        "os.fstatvfs",
        "os.statvfs",
        "os.unlink",
        "os.utime",
        "os.waitid",
        "os.waitpid",
        "os.write",
        "resource.setrlimit",
        "select.epoll",
        "select.poll",
        "select.select",
        "signal.pause",
        "signal.pidfd_send_signal",
        "socket.create_connection",
        "socket.create_server",
        "socket.getaddrinfo",
        "socket.recv_fds",
        "socket.send_fds",
        "socket.socket",
        "socket.socketpair",
        "subprocess.Popen",
        "subprocess.run",
        "tempfile.NamedTemporaryFile",
        "tempfile.TemporaryDirectory",
        "tempfile.mkdtemp",
        "threading.Thread",
        "threading.stack_size",
        "tempfile.mkstemp",
    ]
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a seam: `kernel_mcp/linux/safe_tree.py:40:8`, and what is called."""

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place} {self.name}"


class Names(ast.NodeVisitor):
    """The objects that the names of a module stand for."""

    def __init__(self, tree: ast.AST) -> None:
        self.known: dict[str, str] = {}
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            top = name.name.partition(".")[0]
            self.known[name.asname or top] = name.name if name.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self.known[name.asname or name.name] = f"{node.module}.{name.name}"

    def of(self, called: ast.expr) -> str:
        """The name by which a seam is known; empty for what is none."""
        parts: list[str] = []
        node = called
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            if node.id in self.known:
                whole = ".".join([self.known[node.id], *reversed(parts)])
                if any(whole == each or whole.startswith(f"{each}.") for each in SYSTEM_MODULES):
                    return whole
                if not whole[0].islower() or whole.startswith(("kernel_", "mcp", "anyio.", "re.")):
                    return self._method(parts) if "Path" in whole or len(parts) > 1 else ""
            if node.id == "open" and not parts:
                return "open"
        return self._method(parts)

    @staticmethod
    def _method(parts: list[str]) -> str:
        return f".{parts[0]}" if parts and parts[0] in METHODS else ""


def calls_in(path: Path) -> Iterator[Call]:
    """The calls of seams in a module, and of what is harmless."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = Names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := names.of(node.func)):
            yield Call(place_of(path, node), name)


def place_of(path: Path, node: ast.Call) -> str:
    """Where a call stands."""
    return f"{path.relative_to(PACKAGE.parent)}:{node.lineno}:{node.col_offset}"


def all_calls() -> list[Call]:
    """Those of the whole package."""
    return [call for path in sorted(PACKAGE.rglob("*.py")) for call in calls_in(path)]
