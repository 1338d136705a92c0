"""The policy: what code may import, and what is said about code before it runs.

A guard rail for well-meaning code. The boundary is the sandbox.
"""

from kernel_mcp.policy.model import PROFILES, Policy

__all__ = ["PROFILES", "Policy"]
