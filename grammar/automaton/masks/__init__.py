"""Token masks: the tokens that an automaton can read from a state and a stack."""
