"""Many machines: sessions on the nodes of a Ray cluster, and fronts that reach all of them.

A node is one process of a machine that has sessions as a server has them. What it saves goes to a
store that all nodes share, so that another node goes on with a session whose node is lost.
"""
