"""Programs as graphs: tracing a body to a graph, showing the graph, running it."""
