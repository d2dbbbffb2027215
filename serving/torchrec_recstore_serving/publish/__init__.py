"""Publishes a model while it is trained, and follows its publications elsewhere."""
