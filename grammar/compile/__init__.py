"""The grammar compiler: a constraint in, a compiled grammar as bytes out.

    policy          which engine and which reader a constraint needs
    compiled        what comes out
    foreign         constraints through other libraries; keywords: what these are known to enforce
    outlines        outlines-core's automata, as ours
    structural_tag  the notation that may contain the others, as rules
    job             one compile job in a child process: its memory limit, and errors as answers
    child_jobs      one child process for each job: their turns and their limits of time
    grammar_files   compiled grammars on disk

The compiler's process is `ramify.runtime.processes.grammar_compiler`; the scheduler's side of it is
`ramify.runtime.scheduler.grammars`.
"""
