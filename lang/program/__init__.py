"""A run of a program and its branches, down to the steps of each branch.

    run          one run: backend, options, branches, end
    state        `s`, which the body appends to; its steps are `nodes`
    branch       the queue of one branch's steps; `interpreter` does them, `fork` groups branches
    variables    the results of steps, which readers wait for (`event`); `streaming` while they are generated

`show` and `state_html` are views of a state in a terminal and in a notebook. `caller` finds the user's line
for errors; `unsupported` refuses names of SGLang's frontend by name.
"""
