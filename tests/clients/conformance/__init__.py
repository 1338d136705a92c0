"""A server for the conformance suite, and what it fails on purpose."""
