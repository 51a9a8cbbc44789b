"""Several replicas of one model on this machine: which of them takes a request, and what becomes of it.

index       which replica holds which pages, as its tree tells
placement   where a request goes: least work left, the work already promised included
replica     an engine core as the fleet sees it; supervisor: one of this machine, restarted when it dies
fleet       engine cores behind one frontend: messages to them and from them
routing     requests: each finds a replica, is sent and ends; request: what is known of one
replica_set   replicas by name: they start, drain, leave, die and come back
control_calls   messages that one replica or all of them answer
local       the engine cores of this machine
moves       when cached pages are moved to another replica; kv_connector: moves them
stats       their figures as those of one

`index`, `placement` and `moves` are pure: no I/O, no clock, no processes.
"""
