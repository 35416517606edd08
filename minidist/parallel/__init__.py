"""One file per way to divide the work of training."""
