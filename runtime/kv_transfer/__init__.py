"""KV transfer: the pages of a prefix as a KV snapshot, which another replica takes into its own prefix tree.

snapshot   the KV snapshot: header, token ids, checksums, pages
identity   what two replicas must have in common, so that the pages of one are those of the other
store      what a fleet needs of the place where KV snapshots lie
files      KV snapshots as files in shared memory: private, and gone with their owner

`ramify.runtime.scheduler.transfers` writes and reads KV snapshots between steps.
"""
