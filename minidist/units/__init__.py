"""How ZeRO keeps a model: its parts (unit.py), the flat tensors of their parameters (flat.py), and back (whole.py).

    Zero --> unit.py: what is gathered and reduced at one time --> flat.py: one dtype's parameters, cut over the ranks

whole.py gathers them into the module's own state dict again.
"""
