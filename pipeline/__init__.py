"""The data: pages, graph, questions, rollouts, buckets, traces and tasks; evaluation and report."""
