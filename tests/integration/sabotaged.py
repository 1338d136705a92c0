"""Sandboxes without some of their parts, to show what those parts are for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import BOOT_FOLDER, SandboxCommand, SandboxRequest
from kernel_mcp.sandbox.bwrap import BwrapSandbox


class Sabotaged(BwrapSandbox):
    """Bubblewrap without some of its options.

    Each of `missing` are words that follow each other; a `*` stands for any word.
    """

    missing: Sequence[Sequence[str]] = ()

    @classmethod
    def without(cls, *words: str) -> Sabotaged:
        """As this machine has it, but these words."""
        return cls.lacking(words)

    @classmethod
    def lacking(cls, *missing: Sequence[str], boot: Path = BOOT_FOLDER) -> Sabotaged:
        """As this machine has it, but all of these; kernels boot from `boot`."""
        made = cls.detect(boot)
        assert isinstance(made, Sabotaged)
        made.missing = missing
        return made

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """The command with a shorter list of options."""
        made = super().command(request, identity)
        options = int(made.argv[made.argv.index("--args") + 1])
        words = os.pread(options, 1 << 20, 0).decode().split("\0")
        for missing in self.missing:
            at = next(at for at in range(len(words)) if _begins(words[at:], missing))
            del words[at : at + len(missing)]
        os.ftruncate(options, 0)
        os.pwrite(options, "\0".join(words).encode(), 0)
        return made


def _begins(words: Sequence[str], missing: Sequence[str]) -> bool:
    return all(wanted in (word, "*") for wanted, word in zip(missing, words, strict=False))
