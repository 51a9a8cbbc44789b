"""The grammar compiler: a constraint in, a compiled grammar as bytes out.

The compiler's process is `ramify.runtime.processes.grammar_compiler`; the scheduler's side of it is
`ramify.runtime.scheduler.grammars`.
"""
