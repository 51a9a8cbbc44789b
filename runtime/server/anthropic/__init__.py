"""Anthropic's Messages API, as thin as a dialect can be: its chats become those of `openai.chat`.

`turns` parses the system prompt and the messages, `options` the tools, the thinking and the output format,
`cache` the marks of prefixes. `writer` makes messages and events, and `endpoint` has the routes.
"""
