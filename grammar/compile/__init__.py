"""The grammar compiler: a constraint in, a compiled grammar as bytes out.

    policy          chooses the compiler and the engine for a constraint; returns a `foreign.Compiled`
    foreign         constraints compiled by other libraries; `keywords`: the keywords that each enforces
    outlines        outlines-core's automata, converted to our pushdown automata
    structural_tag  structural tags, a notation that may contain the others, as rules
    job             a compile job in a child process: its memory limit, and errors as answers
    child_jobs      one child process for each job: the order of the jobs, and their time limits
    grammar_files   compiled grammars on disk

The compiler's process is `ramify.runtime.processes.grammar_compiler`; the scheduler's side of it is
`ramify.runtime.scheduler.grammars`.
"""
