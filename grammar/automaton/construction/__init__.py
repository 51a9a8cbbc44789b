"""Construction of pushdown automata from rules, in the order of its steps.

compiler              decides which rules are called rather than inlined, and runs the other steps
counted               turns long repetitions into rules that count with the stack
nodes                 the rules as arrays, and the atoms (sets of characters that no rule tells apart)
work                  room for the states and positions of `subset_construction`
positions             parts of a rule that may be read next, and what follows them (Glushkov's positions)
groups                characters that the same positions of a state read
subset_construction   sets of positions become states over characters, which may call rules
byte_edges            characters become the bytes of their UTF-8
pruning               dead states are removed, equal ones merged
costs                 the shortest completion from each state
unique_items          the number of unique items, and their costs
completions           the shortest completions of objects whose members come in any order
runs                  states from which any n characters of a kind may come
"""
