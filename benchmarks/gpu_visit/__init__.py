"""A visit to a machine with a GPU, in three calls: A first contact, B figures, C breadth.

    python -m benchmarks.gpu_visit A [--out FOLDER] [--only PART …] [--tiny]

A call is a list of parts (`calls`). Each part is a process with a time limit (`driver`). It writes its
figures as it goes. One that fails or is stopped keeps its tracebacks and does not stop the others.
`--tiny` rehearses a call on small shapes without a GPU, in Triton's interpreter.
"""
