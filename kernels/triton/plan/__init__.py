"""Host-side planning of attention launches.

attention_config   the tiles of the kernel, by shape and device
attention_plan     tasks become work items and merges: the plan of a batch
cascade_groups     the tree of shared prefixes of a batch, and the nodes that are worth reading once
attention_graph    a plan at fixed addresses, for CUDA graphs
"""
