"""What the scripts share.

A package, so that no other module named ``common`` on the path comes first.
"""
