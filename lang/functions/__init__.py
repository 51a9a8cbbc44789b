"""Decorated functions: the program objects that users run, bind, compile and run in batches.

program the base of both kinds: arguments, options, the start of a run function a body that is a plain
function; `async_function` one that is a coroutine function compiled programs of both kinds that run as graphs
"""
