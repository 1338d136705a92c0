"""`verify`: run a notebook, or that of a receipt, again in a server of its own, and compare."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.config.load import settings_from, settings_parser
from kernel_mcp.errors import InputError
from kernel_mcp.launch.base import DOORS
from kernel_mcp.linux.process import is_terminal
from kernel_mcp.linux.safe_tree import make_private
from kernel_mcp.notebooks.document import NotebookDocument
from kernel_mcp.records import dataclass
from kernel_mcp.verification.receipt import (
    FOLDER_NAME,
    INVALID,
    ReceiptError,
    read_receipt,
    receipt_path,
)
from kernel_mcp.verification.replay import copy_tree
from kernel_mcp.verification.steps import Log, steps_of

if TYPE_CHECKING:
    from mcp_types import CallToolResult

DIFFERS, DID_NOT_RUN = 1, 3
"""Exit status: something differs; it did not run to the end."""
SUFFIX = ".receipt.json"
KEY = "kernel-mcp/verification"
_ABOUT = """\
Run the cells of a notebook again in a fresh kernel without network, on a copy of the notebook's
folder, and compare what they give with what the file has recorded. Further flags are those of the
server, such as --allow.
"""
_EPILOG = """\
exit code: 0 reproduced, 1 differs, 2 wrong usage, 3 did not run to the end, 4 the receipt is
damaged, or not of this notebook
"""
_SHOWN = (
    "allow", "profile", "python", "requirements", "project", "sandbox", "memory", "timeout",
    "mount", "network", "config",
)  # fmt: skip
_STATUS = {"reproduced": 0, "differs": DIFFERS, "fragile": DIFFERS, "failed": DID_NOT_RUN}


@dataclass(frozen=True, slots=True)
class _Asked:
    """The request of a command line: `flags` are those of the server."""

    path: Path
    as_json: bool
    opened: tuple[str, ...]
    flags: tuple[str, ...]


def run_verify(argv: Sequence[str]) -> int:
    """Run `verify` and return its exit code. Raises ConfigError, InputError."""
    asked = _asked(argv)
    try:
        book = _notebook(asked.path)
    except ReceiptError as error:
        _show(asked, {"verdict": "invalid", "text": str(error)})
        return INVALID
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-verify-") as folder:
        place = Path(folder) / "work" / "default"
        make_private(place)
        copy_tree(book.parent, place)
        found = anyio.run(_verified, asked, book.name, place.parent)
    _show(asked, found)
    return _STATUS.get(str(found["verdict"]), DID_NOT_RUN)


def _asked(argv: Sequence[str]) -> _Asked:
    parser = settings_parser("kernel-mcp verify", _ABOUT, _EPILOG, shown=_SHOWN)
    parser.add_argument("path", metavar="PATH", help="a notebook or a receipt")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--open", action="append", choices=DOORS, help="leave this door open")
    flags = vars(parser.parse_args(list(argv)))
    path, as_json = flags.pop("path"), bool(flags.pop("json", False))
    opened = tuple(flags.pop("open", None) or ())
    settings_from(flags)  # refuses wrong values
    words = [*argv]
    words.remove(path)
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--open":
            words.pop(0)
        elif word != "--json" and not word.startswith("--open="):
            rest.append(word)
    return _Asked(Path(path), as_json, opened, tuple(rest))


def _notebook(path: Path) -> Path:
    """Return the path of a notebook, or that of a receipt. Raises ReceiptError, InputError."""
    if not path.is_file():
        raise InputError(f"{path} is no file: pass a notebook or its receipt.")
    if path.suffix == ".ipynb":
        return path.resolve()
    receipt = read_receipt(path.read_bytes())
    book = _book_of(path.resolve())
    document = NotebookDocument.read(str(book), book.read_bytes())
    stale = receipt.stale([each.source for each in steps_of(document, Log())])
    if stale:
        named = ", ".join(map(str, stale[:5]))
        raise ReceiptError(
            f"This receipt is not of {book.name!r} as it is: the code of cells {named} is another. "
            "Run verify in its session again."
        )
    return book


def _book_of(receipt: Path) -> Path:
    """Return the notebook beside a receipt. Raises ReceiptError if there is none, or several."""
    if receipt.name.endswith(SUFFIX):
        found = [receipt.with_name(receipt.name.removesuffix(SUFFIX) + ".ipynb")]
    elif receipt.name == FOLDER_NAME:
        found = sorted(receipt.parent.glob("*.ipynb"))
    else:
        found = []
    if len(found) != 1 or not found[0].is_file():
        raise ReceiptError(f"Beside {receipt.name!r} is no notebook that it could be of.")
    return found[0]


async def _verified(asked: _Asked, name: str, workspaces: Path) -> dict[str, Any]:
    """Return the result of the tool `verify` of a server with these workspaces."""
    from mcp import StdioServerParameters
    from mcp.client import Client

    own = ("--workspace", str(workspaces), "--persist", "off", "--warm", "0")
    words = ["-m", "kernel_mcp", *asked.flags, *own]
    server = StdioServerParameters(command=sys.executable, args=words)

    async def report(progress: float, total: float | None, message: str | None) -> None:
        if message and is_terminal(sys.stderr):
            print(message, file=sys.stderr, flush=True)

    async with Client(server) as client:
        while True:
            arguments = {"path": name, "wait": 3600, "doors": [*asked.opened]}
            answer = await client.call_tool("verify", arguments, progress_callback=report)
            found = _result(answer, receipt_path(name))
            if found is not None:
                return found


def _result(answer: CallToolResult, receipt: str) -> dict[str, Any] | None:
    """Return the result in an answer; None if the verification goes on.

    It does not name the `receipt`, which is in the copy alone.
    """
    text = "\n".join(getattr(block, "text", "") for block in answer.content)
    text = text.removeprefix("[kernel-mcp] ").replace(f" Receipt: {receipt!r}.", "")
    if answer.is_error:
        return {"verdict": "failed", "text": text}
    found = (answer.meta or {}).get(KEY)
    return None if found is None else {**found, "text": text}


def _show(asked: _Asked, found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=2) if asked.as_json else found["text"])
