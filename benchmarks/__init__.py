"""What kernel-mcp costs, measured beside what it replaces: `python -m benchmarks --help`."""
