"""Exports trained models as files that run without this package, and writes deltas of
them.
"""
