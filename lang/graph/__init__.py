"""Programs as graphs: tracing a body to a graph, showing graphs, and running graphs."""
