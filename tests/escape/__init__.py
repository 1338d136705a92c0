"""Attacks on the sandbox, run inside it; none may succeed."""
