"""Decisions of remote endpoints.

apis     : the bodies and the answers of decision APIs: OpenAI's and System One
logprobs : decisions of endpoints without such an API, by the log-probabilities of labels
"""
