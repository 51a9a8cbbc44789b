"""OpenAI's API: chat completions, completions and, in `responses/`, the Responses API.

A request is parsed by `chat` (with `chat_turns`, `tools`, `reasoning` and `output_format`) and by `request`.
The output is split by `turn_parser`, and written by `formatters` with the parts in `bodies`.
"""
