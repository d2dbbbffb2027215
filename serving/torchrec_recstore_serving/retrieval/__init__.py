"""Finds the rows of a served model that are nearest to a query."""
