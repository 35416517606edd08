"""What all labs do alike: measure on every rank (measuring.py), write a file a run (running.py), draw (drawing.py)."""
