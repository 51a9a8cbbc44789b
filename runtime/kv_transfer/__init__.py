"""KV transfer: cached pages of a prefix as a KV snapshot, which another replica imports into its prefix tree.

snapshot       the KV snapshot: header, token ids, checksums, pages
identity       what two replicas must have in common to be able to use each other's pages
files          KV snapshots as files in shared memory: private, and removed with their owner
kv_snapshots   KV snapshots of one engine core as bytes, for other machines

`ramify.runtime.scheduler.transfers` writes and reads KV snapshots between steps.
"""
