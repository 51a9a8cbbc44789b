"""The processes of the ring: start, sockets, end; the tokenizer, the detokenizer, the grammar compiler."""
