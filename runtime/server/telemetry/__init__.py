"""What a server tells of its requests: log lines, spans of OpenTelemetry, and the id of each request."""
