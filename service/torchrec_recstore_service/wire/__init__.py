"""The protocol of clients and servers, and how a set of servers agrees."""
