"""Code of sessions connects where the operator permits it, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp.client import Client

from tests.escape.test_mounted_folders import WAYS, opened
from tests.integration.agent import Agent, Answer, command

pytestmark = pytest.mark.anyio
