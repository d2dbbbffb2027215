"""Models of the field.

A package, so that no other module named ``models`` on the path comes first.
"""
