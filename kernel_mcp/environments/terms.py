"""`Terms`: for whom an environment is built, and how much of the disk it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """How an environment is to be built and kept.

    agent       whether an agent asks for it, so that it goes when it is old or too much
    most_bytes  what may be downloaded, and what unpacked; 0 for no limit
    flag        the setting that says so
    """

    agent: bool = False
    most_bytes: int = 0
    flag: str = "--install-size"


OPERATORS = Terms()
"""Whatever the operator names is built and kept."""
