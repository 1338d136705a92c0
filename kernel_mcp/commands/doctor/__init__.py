"""`kernel-mcp doctor`: start real sandboxed kernels and report what holds.

examine   one backend: the self-test from inside, then a kernel and what it may; the report
trials    what a kernel is put through, one resource or boundary at a time; a server that is killed
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

import anyio

from kernel_mcp.config.load import settings_from, settings_parser

ABOUT = """\
Start a sandboxed kernel with every backend this machine has, or with those of --sandbox, and
report what holds, what does not, and what to do about it. Give it the flags of your server.
"""
SHOWN = (
    "allow", "profile", "python", "index-url", "find-links", "offline", "cache-dir", "sandbox",
    "container-engine", "container-image", "container-runtime", "no-template", "memory", "cpus",
    "mount",
)  # fmt: skip
EPILOG = """\
exit code: 0 when the sandbox holds that a server with these flags would use, else 1
"""


def main(argv: Sequence[str]) -> int:
    """Run `doctor`; its exit code. Raises ConfigError."""
    parser = settings_parser("kernel-mcp doctor", ABOUT, EPILOG, shown=SHOWN)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    flags = vars(parser.parse_args(list(argv)))
    as_json = bool(flags.pop("json", False))
    settings = settings_from(flags)
    from kernel_mcp.commands.doctor import examine
    from kernel_mcp.commands.doctor.examine import examine_all

    logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr)

    async def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)

    diagnosis = anyio.run(examine_all, settings, progress)
    if as_json:
        print(json.dumps(examine.as_json(diagnosis), indent=2))
    else:
        print(examine.as_text(diagnosis, colour=sys.stdout.isatty()))
    return 0 if diagnosis.holds else 1
