"""Commands beside the server: what `kernel-mcp WORD` runs."""
