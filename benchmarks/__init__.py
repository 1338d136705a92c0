"""The costs of kernel-mcp, measured beside what it replaces: `python -m benchmarks --help`."""
