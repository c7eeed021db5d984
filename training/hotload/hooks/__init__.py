"""Publishing from a training loop."""
