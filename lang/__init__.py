"""The DSL: programs of many generations become requests to a backend.

    api         the functions that programs are written with: `function`, `gen`, `select`, `tool`, …
    functions   decorated functions: their arguments and options, runs, batches, compiled programs
    batch       many rows: concurrency, order, the results file
    graph       programs traced to graphs
    state       `s`, its forks, and its text and values while they are generated
    program     a run, and the branches that run its steps
    calls       one request: options, limits, delivery, scoring of choices
    backends    endpoints over HTTP, scripts, recordings
    trace       the tree of calls, as text and as a report
    prompt      the content of a branch: chat turns, thoughts, and the prompt that a model reads
    grammars    ready grammars as constraints
    tools       functions that a model may call, and the text of their calls
    typed       Python types as JSON schemas; values parsed from complete or partial JSON
    common      the user's line in errors, an event for threads and loops

Layers, lowest first: common; typed; tools; grammars; prompt; trace; backends; calls; program; state; graph;
batch; functions; own modules.

`lang` imports the shared modules of `ramify` and `grammar`, and nothing of `runtime`.
"""
