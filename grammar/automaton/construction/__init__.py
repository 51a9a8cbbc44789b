"""Construction of pushdown automata from rules, in the order of its steps.

compiler              decides which rules are called, and runs the other steps
counted               long repetitions become rules that count with the stack
nodes                 the rules as arrays, and the sets of characters that they tell apart
work                  room for the states and positions of `subset_construction`
positions             parts of a rule that may be read next, and what follows them (Glushkov's positions)
subset_construction   sets of positions become states over characters, which may call rules
byte_edges            characters become the bytes of their UTF-8
pruning               dead states are removed, equal ones merged
costs                 the shortest completion from each state
unique_items          the number of unique items, and their costs; `completions`: members in any order
runs                  states from which any n characters of a kind may come
"""
