"""Faults of the system, injected at every call of this package that reaches it."""
