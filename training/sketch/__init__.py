"""Send a LoGRA update as its integer factors: a few bytes a row, and the same bits at both ends."""
