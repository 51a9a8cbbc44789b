"""Device code of the larger Triton kernels, and what all launches share (launch).

attention_tile    the attention kernel: a tile of query rows walks over a range of positions
merge             merges the softmax states that several work items leave for one query
sampling_tile     blocks of logits with mask and temperature, orders, exponentials: shared by the rest
sampling_scan     the passes over all logits: maxima, masses, candidates
sampling_sort     a bitonic sort in registers
sampling_search   the rare case of more candidates than a sort holds: passes over the row
"""
