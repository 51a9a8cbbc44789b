"""Decorated functions: the program objects that users run, bind, compile and run in batches.

arguments        the types of the arguments of programs, for type checkers
program          the bases of sync, async and compiled programs: arguments, options, the start of a run
function         programs whose body is a plain function
async_function   programs whose body is a coroutine function
"""
