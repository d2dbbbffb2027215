"""Training from a stream of clicks.

A package, so that no other module named ``online`` on the path comes first.
"""
