"""Tools: functions that a model may call. Their schemas, their descriptions in prompts, and the form of calls
and results."""
