"""The grammar compiler: a process that forks a child for each constraint.

    process         the compiler's process: takes jobs from the scheduler, answers from disk or with a child
    forked_jobs     the children: their turns, their limits of time and memory
    job             what a child does, and how whatever goes wrong becomes an answer
    policy          a constraint to a compiled grammar
    structural_tag  the one notation that may hold all the others
    grammar_files   compiled grammars on disk

The scheduler's side is `ramify.runtime.scheduler.constraints.grammars`.
"""
