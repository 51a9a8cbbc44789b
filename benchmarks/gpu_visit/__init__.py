"""A visit to a machine with a GPU, in three calls: A, first contact; B, figures; C, tests.

    python -m benchmarks.gpu_visit A [--out FOLDER] [--only PART …] [--tiny]

A call is a list of parts (`calls`). Each part is a process with a time limit (`driver`), and writes its
figures as it goes. If a part fails or is stopped, its tracebacks are kept and the other parts go on. `--tiny`
rehearses a call on small shapes without a GPU, in Triton's interpreter.
"""
