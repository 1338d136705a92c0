"""Fleets: sessions on the nodes of a Ray cluster, and fronts through which clients reach them.

A node is one process on a machine, which runs sessions as a server does. It saves them to a store
that all nodes share. If a node is lost, other nodes continue its sessions from there.
"""
