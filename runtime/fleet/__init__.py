"""Several replicas of one model: which of them takes a request. Pure: no I/O, no clock, no processes.

index       which replica holds which pages, as its tree tells
placement   where a request goes: least work left, the work already promised included
"""
