"""The running sandboxes in which the keeper masks paths."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kernel_specs import linux


class MaskedSandboxes:
    """Holds the mount namespace of each sandbox, and a pidfd of one of its processes."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int]] = []

    @property
    def namespaces(self) -> frozenset[int]:
        """Inodes of their mount namespaces."""
        return frozenset(os.fstat(namespace).st_ino for namespace, _ in self._held)

    @contextmanager
    def adding(self, pid: int) -> Iterator[tuple[int, int]]:
        """Yield both descriptors of a sandbox, which is added unless this block raises.

        `pid` is a process of the sandbox. Raises OSError.
        """
        with ExitStack() as undo:
            namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, namespace)
            process = os.pidfd_open(pid)
            undo.callback(os.close, process)
            yield namespace, process
            self.running()
            self._held.append((namespace, process))
            undo.pop_all()

    def running(self) -> list[tuple[int, int]]:
        """Close and forget the sandboxes that have ended; return the others."""
        ended = select.poll()
        for _, process in self._held:
            ended.register(process, select.POLLIN)
        gone = {fd for fd, _ in ended.poll(0)}
        linux.close_all([fd for held in self._held if held[1] in gone for fd in held])
        self._held = [held for held in self._held if held[1] not in gone]
        return list(self._held)

    def close(self) -> None:
        """Close all descriptors."""
        linux.close_all([fd for held in self._held for fd in held])
        self._held.clear()
