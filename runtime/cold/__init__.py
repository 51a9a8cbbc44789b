"""The cold tier: KV pages outside of the page pool, in files that outlive the process or in host memory.

tier      reads prefixes before their requests are queued, and before tools return
expected  the next uses of programs' prefixes
writer    writes prefixes in idle time
gate      reading or computing, by measured times
store     the interface of a store; files: segments in a folder; memory: segments in the host's memory
open      the stores that the options ask for
worker    the thread in which stores are read and written
"""
