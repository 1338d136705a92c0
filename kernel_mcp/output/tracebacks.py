"""Tracebacks cut down to what the reader of a cell can act on.

IPython sends one string per frame, in its own layout (`Cell In[1], line 3`, `File x.py:3, in f`
with numbered source lines) or in plain Python's. Both are read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kernel_mcp.output.events import Failure
from kernel_mcp.output.terminal import clean

TITLE = "Traceback (most recent call last):"
MAX_OWN_FRAMES = 20
MAX_SOURCE_LINES = 4
LINE_CHARS = 300

_CELL = re.compile(r"\s*(?:Cell|Input) In ?\[\d+\], line \d+")
_FILE = re.compile(r'\s*File (?:"(?P<plain>[^"\n]+)", line \d+|(?P<path>[^"\n]+?):\d+)(?:, in .*)?')
_NOISE = re.compile(r"-{20,}|(?:\S+ +)?Traceback \(most recent call last\):?")
_REPEATED = re.compile(r"\s*\[(?:\.\.\.|Previous line)")
_ARROW = re.compile(r"-+> ?\d* ?(.*)")
_NO_SOURCE = "'Could not get source"
_BODY = re.compile(r"\s|-+>|$")
_PACKAGES = r"(?:site|dist)-packages/"
_LIBRARY = re.compile(rf"(?:/lib/python[\d.]+t?/(?:{_PACKAGES})?|{_PACKAGES})([^/]+)")
_FOREIGN = re.compile(r"site-packages|dist-packages|/lib/python|/\.venv/|/\.cache/")


@dataclass(slots=True)
class _Frame:
    header: str
    path: str
    own: bool
    body: list[str] = field(default_factory=list)


def shortened(failure: Failure, workspace: str = "/workspace") -> tuple[str, str]:
    """The user's own frames, and the exception itself.

    Frames outside cells and the folder `workspace` are counted, not shown.
    """
    parts = _parsed(failure, workspace)
    end = max((i + 1 for i, part in enumerate(parts) if isinstance(part, _Frame)), default=0)
    message = "\n".join(part for part in parts[end:] if isinstance(part, str)).strip("\n")
    if failure.name not in message:
        message = f"{clean(failure.name)}: {clean(failure.value)}\n{message}".rstrip()
    lines = _told(parts[:end])
    return "\n".join([TITLE, *lines]) if lines else "", message


def _parsed(failure: Failure, workspace: str) -> list[_Frame | str]:
    """Frames, and the lines between them."""
    parts: list[_Frame | str] = []
    texts = [clean(text) for text in failure.traceback]
    for index, text in enumerate(texts):
        if index and index == len(texts) - 1 and _frame(text.partition("\n")[0], workspace) is None:
            parts.extend(text.split("\n"))
            break
        frame: _Frame | None = None
        for line in text.rstrip("\n").split("\n"):
            if _NOISE.fullmatch(line):
                frame = None
            elif started := _frame(line, workspace):
                frame = started
                parts.append(frame)
            elif frame is not None and _BODY.match(line) and not _REPEATED.match(line):
                frame.body.append(line)
            else:
                frame = None
                parts.append(line)
    return parts


def _frame(line: str, workspace: str) -> _Frame | None:
    """The frame that begins with `line`, if one does."""
    if _CELL.match(line):
        return _Frame(line.strip(), "", own=True)
    match = _FILE.fullmatch(line)
    if match is None:
        return None
    path = match.group("plain") or match.group("path")
    if path.startswith("<"):
        own = not path.startswith(("<frozen", "<__array"))
    else:
        own = path.startswith((f"{workspace}/", "~/", "/tmp/ipykernel_")) or path[0] != "/"
        own = own and not _FOREIGN.search(path)
    return _Frame(line.strip(), path, own)


def _told(parts: list[_Frame | str]) -> list[str]:
    """Lines for own frames and for runs of the others."""
    lines: list[str] = []
    hidden: list[_Frame] = []
    own = sum(isinstance(part, _Frame) and part.own for part in parts)
    seen = 0
    for part in parts:
        if isinstance(part, _Frame) and part.own:
            seen += 1
            if MAX_OWN_FRAMES // 2 < seen <= own - MAX_OWN_FRAMES // 2:
                hidden.append(part)
                continue
        elif isinstance(part, _Frame):
            hidden.append(part)
            continue
        lines += _counted(hidden)
        hidden.clear()
        lines += [part[:LINE_CHARS]] if isinstance(part, str) else _shown(part)
    return lines + _counted(hidden)


def _shown(frame: _Frame) -> list[str]:
    """The header and the line of code it stands for, or all lines when none is marked."""
    source = [match.group(1).strip() for line in frame.body if (match := _ARROW.match(line))]
    if not source:
        source = [line for line in frame.body if line.strip()]
        margin = min((len(line) - len(line.lstrip()) for line in source), default=0)
        source = [line[margin:] for line in source]
    source = [line[:LINE_CHARS] for line in source if not line.startswith(_NO_SOURCE)]
    return [frame.header[:LINE_CHARS], *(f"    {line}" for line in source[:MAX_SOURCE_LINES])]


def _counted(frames: list[_Frame]) -> list[str]:
    if not frames:
        return []
    names: list[str] = []
    for frame in frames:
        match = _LIBRARY.search(frame.path)
        name = match.group(1).removesuffix(".py") if match else ""
        if name and name not in names:
            names.append(name)
    inside = f" inside {', '.join(names[:3])}" if names else ""
    return [f"[… {len(frames)} frame{'s' if len(frames) > 1 else ''}{inside} …]"]
