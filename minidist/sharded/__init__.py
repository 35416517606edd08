"""How tensor parallelism cuts a module: roles of its layers (roles.py), and the layers that come of it (layers.py).

tensor_parallel --> roles.py: which layer is cut how --> layers.py: a slice each --> entry.py: how a tensor enters
"""
