"""What clients and servers send each other: messages, tables, and the agreement of a
set of servers.
"""
