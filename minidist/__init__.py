"""minidist: how one model is trained across many chips, small enough to read in a weekend."""
