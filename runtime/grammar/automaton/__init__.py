"""From rules to pushdown automata over bytes, and the tokens that an automaton's state allows."""
