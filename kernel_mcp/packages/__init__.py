"""Packages that a session adds to its environment while it lives."""
