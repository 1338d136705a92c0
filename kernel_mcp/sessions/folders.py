"""The folders of a session, made again where somebody has removed them under a running server."""

from __future__ import annotations

from kernel_mcp.environments.layer import Layer
from kernel_mcp.kernels.factory import Demand
from kernel_mcp.linux.safe_tree import make_private

REMOVED = "The workspace folder of this session has been removed from outside"


def restore(demand: Demand) -> list[str]:
    """Make what is missing of a session's folders; what it has lost by that, in sentences.

    Raises OSError.
    """
    lost = []
    if not demand.workspace.exists():
        make_private(demand.workspace)
        lost.append(f"{REMOVED}: its files are gone, and it has a new, empty one")
    if demand.layer is not None and not demand.layer.exists():
        Layer(demand.layer).make()
        lost.append(
            "The folder of this session's own packages has been removed from outside: any packages "
            "that were installed have to be installed again"
        )
    return lost
