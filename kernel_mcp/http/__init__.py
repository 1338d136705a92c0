"""MCP over HTTP: who may call, what they may send, and an end in order."""
