"""Two revisions measured in turns on one machine, so that a loss is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.results import BenchmarkError

ROOT = Path(__file__).parents[1]
TURNS = 3
"""Runs of each revision: the machine changes its speed within minutes."""
LOSS = 0.9
"""Below so many times the earlier speed a figure is called a loss; runs differ by less."""
OWN = "kernel-mcp"
"""How the names of our subjects begin."""
Row: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str, int]


def compare(revision: str, groups: Sequence[str], *, quick: bool) -> int:
    """Measure a revision and the working tree in turns; print how they compare.

    1 where a figure is a loss, else 0. Raises BenchmarkError.
    """
    with _unpacked(revision) as earlier, tempfile.TemporaryDirectory(prefix="kb-") as scratch:
        runs: dict[Path, list[dict[Key, Row]]] = {earlier: [], ROOT: []}
        for turn in range(1 if quick else TURNS):
            for tree in (earlier, ROOT) if turn % 2 == 0 else (ROOT, earlier):
                name = revision if tree == earlier else "this tree"
                print(f"Turn {turn + 1}: {name}", file=sys.stderr)
                runs[tree].append(_measured(tree, groups, Path(scratch), quick=quick))
    lines, lost = compared(runs[earlier], runs[ROOT])
    print("\n".join([f"{'':64}{revision[:12]:>12}{'this tree':>12}   speed", *lines]))
    return int(lost)


def compared(
    before: Sequence[Mapping[Key, Row]], now: Sequence[Mapping[Key, Row]]
) -> tuple[list[str], bool]:
    """A line for each figure of ours that all runs have, and whether one is a loss."""
    lines, lost = [], False
    own = [key for key in now[0] if key[1].startswith(OWN)]
    shared = [key for key in own if all(key in run for run in (*before, *now))]
    for key in shared:
        speed = _speed([run[key] for run in now]) / _speed([run[key] for run in before])
        title, subject, at = key
        name = f"{title}: {subject}{f', {at} sessions' if at else ''}"
        values = [median(run[key]["median"] for run in runs) for runs in (before, now)]
        told = f"   {speed:5.2f}{'  LOSS' if speed < LOSS else ''}"
        lines.append(f"{name[:63]:64}{values[0]:12.2f}{values[1]:12.2f}{told}")
        lost = lost or speed < LOSS
    return lines, lost


def _speed(rows: Sequence[Row]) -> float:
    """How many times better than the floor of the same run, else than nothing."""
    found = [row["times_better_than_floor"] for row in rows]
    if all(found):
        return float(median(found))
    value = float(median(row["median"] for row in rows))
    return value if rows[0].get("higher_is_better") else 1 / value


def _measured(tree: Path, groups: Sequence[str], scratch: Path, *, quick: bool) -> dict[Key, Row]:
    """The rows of one run of the benchmarks of a tree, by figure and subject."""
    file = scratch / "values.json"
    words = [sys.executable, "-m", "benchmarks", "--json", str(file)]
    words += ["--only", ",".join(groups)] if groups else []
    words += ["--quick"] if quick else []
    done = subprocess.run(
        words,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"the benchmarks of {tree} failed: {done.stderr[-500:]}")
    rows = json.loads(file.read_text(encoding="utf-8"))["figures"]
    return {(row["title"], row["subject"], row["sessions"]): row for row in rows if row["median"]}


@contextmanager
def _unpacked(revision: str) -> Iterator[Path]:
    """The files of a revision in a folder of their own, compiled. Raises BenchmarkError."""
    done = subprocess.run(
        ["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"--compare {revision}: {done.stderr.decode(errors='replace')}")
    with tempfile.TemporaryDirectory(prefix="kb-") as folder:
        with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        compiling = [sys.executable, "-m", "compileall", "-q", folder]
        subprocess.run(compiling, stdout=subprocess.DEVNULL, check=False)
        yield Path(folder)
