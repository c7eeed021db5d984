"""The control plane: which replica takes which weights when, kept in a ledger that survives being killed."""
