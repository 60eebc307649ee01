"""Graph-to-graph functions, one in each file; `docs/graph.md` draws what each of them does."""
