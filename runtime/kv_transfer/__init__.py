"""KV transfer: the pages of a prefix as an image, which another replica takes into its own prefix tree.

image      the image: header, token ids, checksums, pages
identity   what two replicas must have in common, so that the pages of one are those of the other
store      what a fleet needs of the place where images lie
files      images as files in shared memory: private, and gone with their owner

`ramify.runtime.scheduler.transfers` writes and reads images between steps.
"""
