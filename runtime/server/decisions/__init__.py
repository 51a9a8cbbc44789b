"""Decisions: typed questions about a state, answered by the probabilities of their options.

- `state`: the state of a request, from text, JSON or OpenAI's input items.
- `ask`: the questions of a request, asked of the engine, and their answers.
- `rerank`: ``/v1/rerank`` and ``/v1/score``, which ask how relevant texts are.
- `endpoint`: OpenAI's ``/v1/decisions``, whose questions `questions` reads.
- `systemone`: TypeSafe's ``/v1/systemone``, whose questions `systemone_questions` reads.
"""
