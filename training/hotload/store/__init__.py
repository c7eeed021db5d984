"""Snapshots of weights on a path or an object store, and the log that says which of them count."""
