"""Measurements of kernel-mcp as a client sees it: `make bench`."""
