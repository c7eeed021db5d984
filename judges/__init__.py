"""Is this answer right? Yes, no, or no verdict."""
