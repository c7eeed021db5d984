"""Weights into running vLLM servers, usable alone."""
