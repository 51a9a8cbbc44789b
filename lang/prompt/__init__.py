"""The content of a branch: text and token ids, chat turns, thoughts, and the prompt that a model reads."""
