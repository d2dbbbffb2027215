"""The protocol between clients and parameter servers, and connections to servers."""
