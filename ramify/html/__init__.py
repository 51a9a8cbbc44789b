"""What the trace report, the load-test report and the dashboard share: templates, styles, scripts."""
