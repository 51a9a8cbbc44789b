"""OpenAI's Responses API, without stored state."""
