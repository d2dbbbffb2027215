"""Exported models, which run without this package, and deltas of them."""
