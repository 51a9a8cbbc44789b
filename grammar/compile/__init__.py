"""The grammar compiler: a constraint in, a compiled grammar as bytes out.

    policy          the choice of the engine and the reader of a constraint; returns a `foreign.Compiled`
    foreign         constraints through other libraries; `keywords` has those that they enforce
    outlines        outlines-core's automata, as ours
    structural_tag  the notation that may contain the others, as rules
    job             a compile job in a child process: its memory limit, and errors as answers
    child_jobs      one child process for each job: their turns and their limits of time
    grammar_files   compiled grammars on disk

The compiler's process is `ramify.runtime.processes.grammar_compiler`; the scheduler's side of it is
`ramify.runtime.scheduler.grammars`.
"""
