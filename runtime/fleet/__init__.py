"""A fleet: several replicas of one model, and the placement of each request on one of them.

index       which replica holds which pages, from the events of each prefix tree
placement   where a request goes: to the replica with the lowest estimated cost
replica     an engine core as the fleet sees it
supervisor  an engine core of this machine, restarted when it dies
fleet       engine cores behind one frontend: how they start, drain, leave, die and come back
routing     requests: each finds a replica, is sent and ends
control_calls   messages that one replica or all of them answer
local       the engine cores of this machine
moves       when cached pages are moved to another replica
kv_connector    carries out the moves
stats       the counters of all replicas, merged into those of one engine

`index`, `placement` and `moves` are pure: no I/O, no clock, no processes.
"""
