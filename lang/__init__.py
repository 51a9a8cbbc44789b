"""The DSL: programs of many generations become requests to a backend.

    api         the functions that programs are written with: `function`, `gen`, `select`, `tool`, …
    functions   decorated functions: their arguments and options, runs, batches, compiled programs
    program     a run, its state, and the branches that run its steps
    calls       one step's request: prompt, options, retries, scoring of choices
    typed       Python types as JSON schemas; values parsed from complete or partial JSON
    tools       functions that a model may call, and turns of calls
    batch       many rows: concurrency, order, the results file
    graph       programs traced to graphs
    trace       the tree of calls, as text and as a report
    backends    what programs run on: endpoints over HTTP, scripts, recordings

`lang` imports the shared modules of `ramify` and `grammar`, and nothing of `runtime`.
"""
