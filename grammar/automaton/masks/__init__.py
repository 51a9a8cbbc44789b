"""Token masks: the tokens that an automaton can read from a state and a stack.

token_trie            the entry: `TokenTrie.allow` fills a mask
trie                  the prefix tree of all tokens
walk                  the walk over the trie for a deterministic automaton
nondeterministic_walk the walk for a nondeterministic one
registers             the members read in open objects, for the nondeterministic walk
loops                 states that most characters lead back to: most tokens need no walk there
"""
