"""The search agent: one loop, its tools, providers, replay store and language-model client."""
