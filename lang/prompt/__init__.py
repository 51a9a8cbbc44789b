"""The content of a branch: text and token ids, chat turns, and thoughts; and the prompts that models read."""
