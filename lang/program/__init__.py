"""One run of a program and its branches: from the steps of a body to the requests of each branch.

run          one run: backend, options, branches, end
nodes        the steps that a body appends
branch       the queue of one branch's steps; `interpreter` runs them
events       what happens in a run, as `ProgramState.events` yields it; `step_output` notes it
sending      a step's request: prompt, limits, hint
retries      further attempts of a `gen` whose output is not valid
tool_steps   a turn of tool calls
variables    the results of steps, which readers wait for
"""
