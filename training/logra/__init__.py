"""LoGRA: train with low-rank gradient sketches instead of dense gradients and Adam's moments."""
