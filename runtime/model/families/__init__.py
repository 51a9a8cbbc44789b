"""Model families that differ from Llama in more than their configuration; `load.FAMILIES` lists all."""
