"""Load tests of OpenAI-compatible endpoints: workloads, a client, arrivals, figures, and reports."""
