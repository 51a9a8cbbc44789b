"""The DSL: programs of many generations become requests to a backend.

    api         the functions that programs are written with: `function`, `gen`, `select`, `tool`, …
    functions   decorated functions: their arguments and options, runs, batches, compiled programs
    batch       many rows: concurrency, order, the results file
    graph       programs traced to graphs
    state       the state `s`, its forks, and its views
    program     a run, and the branches that run its steps
    calls       one step's request: options, limits, delivery, scoring of choices
    backends    servers, scripts and recordings that programs run on
    trace       the tree of calls, as text and as a report
    prompt      the content of a branch, as a model reads it
    tools       functions that a model may call, and their calls as text
    grammars    ready-made grammars as constraints
    typed       Python types as JSON schemas; values parsed from complete or partial JSON
    common      the line of the user's code for errors, an event, refused names

Layers, lowest first: common; typed; prompt; tools; grammars; trace; backends.decisions; backends;
calls; program; state; graph; batch; functions; own modules.

`lang` imports the shared modules of `ramify` and `grammar`, and nothing of `runtime`.
"""
