"""Templates, styles and scripts of the trace report, the load-test report and the dashboard."""
