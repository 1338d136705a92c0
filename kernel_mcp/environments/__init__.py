"""The virtual environments kernels run in: built by uv, named by hash, shared and read-only."""

from kernel_mcp.environments.metadata import EnvironmentSpec, import_names
from kernel_mcp.environments.store import EnvironmentStore

__all__ = ["EnvironmentSpec", "EnvironmentStore", "import_names"]
