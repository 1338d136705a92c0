"""A notebook for AI agents: persistent IPython kernels in OS sandboxes, served over MCP."""

__version__ = "0.2.0"
