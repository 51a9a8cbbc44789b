"""Token masks: the tokens that an automaton can read from a state and a stack.

token_trie            the entry: `TokenTrie.allow` fills a mask
trie                  the prefix tree of all tokens
walk                  the walk over the trie for a deterministic automaton
nondeterministic_walk the walk for a nondeterministic one
registers             the members read of open objects, which such a walk keeps track of
loops                 states whose characters lead back to them: most tokens need no walk there
"""
