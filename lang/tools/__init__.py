"""Tools: functions that a model may call. Their schemas, their text in prompts, and turns of calls."""
