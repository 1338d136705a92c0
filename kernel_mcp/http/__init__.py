"""MCP over HTTP: authentication, limits on requests, file transfers, and graceful shutdown."""
