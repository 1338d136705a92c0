"""Sandboxes without some of their parts, to show what those parts are for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kernel_mcp.sandbox.base import Identity, SandboxCommand, SandboxRequest
from kernel_mcp.sandbox.bwrap import BwrapSandbox


class Sabotaged(BwrapSandbox):
    """Bubblewrap without some of its options: `missing` words that follow each other.

    A `*` stands for any word.
    """

    missing: Sequence[str] = ()

    @classmethod
    def without(cls, *missing: str) -> Sabotaged:
        """As this machine has it."""
        made = cls.detect()
        assert isinstance(made, Sabotaged)
        made.missing = missing
        return made

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """The command with a shorter list of options."""
        made = super().command(request, identity)
        options = int(made.argv[made.argv.index("--args") + 1])
        words = os.pread(options, 1 << 20, 0).decode().split("\0")
        at = next(at for at in range(len(words)) if self._begins(words[at:]))
        del words[at : at + len(self.missing)]
        os.ftruncate(options, 0)
        os.pwrite(options, "\0".join(words).encode(), 0)
        return made

    def _begins(self, words: Sequence[str]) -> bool:
        return all(wanted in (word, "*") for wanted, word in zip(self.missing, words, strict=False))
