"""Decorated functions: programs as users hold, run, bind, compile and batch them.

program      the base of both kinds: arguments, options, the start of a run
function     a body that is a plain function; `async_function` one that is a coroutine function
compiled     either of them as a graph
"""
