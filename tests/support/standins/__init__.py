"""Small libraries with the interface of others, whose pinned versions clash with ours. Tests put them on PYTHONPATH."""
