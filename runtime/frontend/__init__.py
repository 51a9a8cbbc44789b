"""The frontend: request ids, answers, cancellation, back-pressure and control calls."""
