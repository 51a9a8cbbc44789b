"""A program, its run and its branches: from a decorated function to the steps of each branch.

    program      the base of `function` (sync) and `async_function`: arguments, options, the start of a run
    run          one run: backend, options, branches, end
    state        `s`, which the body appends to; its steps are `nodes`
    branch       the queue of one branch's steps; `interpreter` does them, `fork` groups branches
    variables    the results of steps, which readers wait for (`event`); `streaming` while they are generated

`caller` finds the user's line for errors; `unsupported` refuses names of SGLang's frontend by name.
"""
