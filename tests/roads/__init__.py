"""Every state of a table through every road that its rows can take, and through each
pair of roads.

A road moves a table from one layout (a number of ranks and a sharding) to another: see
``roads.py``. A group is a model whose tables are in different states: see
``groups.py``. ``journeys.py`` takes groups along roads, and compares each shard with a
table that never moved. A new road, option or optimizer is a line in one of these files.
"""
