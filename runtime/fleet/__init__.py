"""Several replicas of one model on this machine: which of them takes a request, and what becomes of it.

index       which replica holds which pages, as its tree tells
placement   where a request goes: least work left, the work already promised included
shares      cores and GPUs of each replica
ring        what a ring is to the fleet
rings       rings behind one frontend: what goes to them, and what comes from them
routing     requests: each finds a replica, is sent and ends; request: what is known of one
members     replicas by name: they start, drain, leave, die and come back
questions   what is asked of one replica or of all
local       the rings of this machine
moves       when cached pages are moved to another replica; mover: moves them
stats       their figures as those of one

`index`, `placement` and `moves` are pure: no I/O, no clock, no processes.
"""
