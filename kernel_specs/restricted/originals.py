"""Copies of library modules as they are before code of cells runs, which may replace functions.

What saves or copies a kernel imports these: one patched function would cost every variable.
"""

from __future__ import annotations

import gc
import io
import json
import marshal
import math
import os
import resource
import select
import signal
import socket
import threading
import time
import types
import warnings
from typing import TYPE_CHECKING


def _copied(module: types.ModuleType) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module))
    return copy


if not TYPE_CHECKING:
    gc, io, json, marshal = map(_copied, (gc, io, json, marshal))
    math, os, resource, select = map(_copied, (math, os, resource, select))
    signal, socket, threading = map(_copied, (signal, socket, threading))
    time, warnings = map(_copied, (time, warnings))

__all__ = [  # as above
    "gc",
    "io",
    "json",
    "marshal",
    "math",
    "os",
    "resource",
    "select",
    "signal",
    "socket",
    "threading",
    "time",
    "warnings",
]
