"""DLRM on Criteo.

A package, so that no other module named ``dlrm`` on the path comes first.
"""
