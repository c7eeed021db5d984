"""SFT, GRPO, and weights into running servers."""
