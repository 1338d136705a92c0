"""What a template loads before its first fork."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernel_specs.restricted import confine, host
from kernel_specs.restricted.config import BootConfig
from kernel_specs.template import pools, rehearsal
from kernel_specs.template.heirlooms import Heirlooms

COMPANIONS = {"matplotlib": ("matplotlib.pyplot", "matplotlib_inline.backend_inline")}
"""What nearly every use of a module loads with it."""


@dataclass(frozen=True)
class Loaded:
    """What came of it.

    missing  modules that cannot be imported, and why
    unfit    modules that start threads or hold what must not be handed down
    folders  hidden folders that were made in /tmp, and that memory refers to
    pools    the native thread pools of these modules
    """

    missing: dict[str, str] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    pools: pools.Pools = field(default_factory=pools.Pools)


def load(kernel: host.KernelHost, names: Sequence[str]) -> Loaded:
    """Import the kernel and `names`; native thread pools stay empty."""
    os.environ.clear()
    os.environ.update(
        confine.environment(BootConfig(workspace="/workspace", tmp="/tmp"), threads=1)
    )
    kernel.preload()
    missing: dict[str, str] = {}
    unfit: list[str] = []
    before = Heirlooms.now()
    for name in names:
        try:
            for module in (name, *COMPANIONS.get(name, ())):
                importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # the cell that needs it will say why
            missing[name] = f"{type(error).__name__}: {error}"
        after = Heirlooms.now()
        if after.more_than(before):
            unfit.append(name)
            before = after
    if not unfit:
        try:
            rehearsal.rehearse(kernel._app, names)
        except Exception as error:  # noqa: BLE001  # kernels are a little slower, no more
            missing["rehearsal"] = f"{type(error).__name__}: {error}"
    return Loaded(missing, tuple(unfit), _hidden_folders(), pools.find())


def _hidden_folders() -> tuple[str, ...]:
    """Parents come before what is in them."""
    found: list[str] = []
    for top in Path("/tmp").glob(".*"):
        found += [folder for folder, _, _ in os.walk(top)]
    return tuple(found)
