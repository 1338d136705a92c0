"""The attacks themselves: plain functions, run in the sandbox by a bare interpreter.

An attack returns a true value when it got what it was after; an exception or a false value means
that the boundary held. Only the standard library may be imported.
"""
