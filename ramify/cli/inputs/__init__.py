"""Files that the commands read: programs, rows of arguments, labelled questions."""
