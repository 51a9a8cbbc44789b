"""The frontend's end of the engine core: request ids, answers, cancellation, back-pressure, supervision."""
