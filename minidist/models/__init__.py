"""The one-rank truth: models that know nothing of ranks."""
