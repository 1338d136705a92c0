"""The tools of each group, in the order in which clients list them."""

from __future__ import annotations

import logging

from kernel_mcp import extensions
from kernel_mcp.errors import ConfigError
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import (
    Toolbox,
    branches,
    cells,
    files,
    notebooks,
    packages,
    sessions,
    verification,
    views,
)

_logger = logging.getLogger(__name__)

TOPICS = {
    "core": (cells, sessions),
    "files": (files,),
    "packages": (packages,),
    "branches": (branches,),
    "notebooks": (notebooks, views, verification),
}


def register(box: Toolbox, services: ToolContext) -> None:
    """Add the tools of the groups that the settings name to `box`, those of extensions last.

    One that fails is logged, and its tools are missing.
    """
    wanted = services.settings.tools
    for group, topics in TOPICS.items():
        if group in wanted:
            for topic in topics:
                topic.register(box, services)
    box.bounded = True
    for group in wanted:
        if group not in TOPICS:
            try:
                extensions.load(extensions.TOOLS, group)(box, services)
            except ConfigError as error:
                _logger.error("%s; its tools are missing", error)
