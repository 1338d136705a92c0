"""The tools of each group, in the order in which clients list them."""

from __future__ import annotations

from kernel_mcp import extensions
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import Toolbox, branches, cells, files, notebooks, packages, sessions, views

TOPICS = {
    "core": (cells, sessions),
    "files": (files,),
    "packages": (packages,),
    "branches": (branches,),
    "notebooks": (notebooks, views),
}


def register(box: Toolbox, services: ToolContext) -> None:
    """Add the tools of the groups that the settings name to `box`, those of extensions last.

    Raises ConfigError for an extension that cannot be loaded.
    """
    wanted = services.settings.tools
    for group, topics in TOPICS.items():
        if group in wanted:
            for topic in topics:
                topic.register(box, services)
    for group in wanted:
        if group not in TOPICS:
            extensions.load(extensions.TOOLS, group)(box, services)
