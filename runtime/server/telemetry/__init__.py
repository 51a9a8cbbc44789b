"""Log lines, spans of OpenTelemetry and ids of requests: what a server tells of them to other programs."""
