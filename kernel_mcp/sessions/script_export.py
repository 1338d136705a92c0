"""A session's cells as a script of their language."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.boundaries import Boundaries
from kernel_mcp.sessions.cell import Cell, Status

_SIGNS = {"#": (".py", ".r", ".sh", ".jl", ".rb", ".pl"), "//": (".js", ".ts", ".cpp", ".scala")}
"""Signs of comments to the end of the line, and the names of files whose languages have them."""


def extension_of(metadata: Mapping[str, Any]) -> str:
    """Return how names of scripts end, by the metadata of a notebook; `.txt` if they do not say."""
    found = str(metadata["language_info"].get("file_extension", ""))
    return found if found[:1] == "." and found[1:].isalnum() else ".txt"


def script(
    cells: Sequence[Cell], metadata: Mapping[str, Any], *, undone: Collection[int] = ()
) -> tuple[bytes, list[int]]:
    """Return the code of the cells that ended well, and the numbers of the others. Blocking.

    A line `# %%` begins each cell where comments begin so, and a comment says where variables were
    lost. Cells in `undone` are left out.
    """
    ending = extension_of(metadata).lower()
    sign = next((sign for sign, known in _SIGNS.items() if ending in known), "")
    boundaries, lost = Boundaries(undone), ""
    kept: list[str] = []
    left: list[int] = []
    for cell in cells:
        lost = boundaries.before(cell) or lost
        if cell.status is Status.OK and cell.number not in undone:
            head = [f"{sign} {one_line(lost)}\n"] if sign and lost and kept else []
            mark = [f"{sign} %%\n"] if sign else []
            kept.append("".join([*head, *mark, f"{cell.recorded.strip()}\n"]))
            lost = ""
        else:
            left.append(cell.number)
    return "\n".join(kept).encode(errors="replace"), left
