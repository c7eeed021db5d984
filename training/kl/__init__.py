"""Predict how far an update moves the policy before it is applied, and scale it to a budget."""
