"""The frontend's end of the ring: request ids, answers, cancellation, back-pressure, supervision."""
