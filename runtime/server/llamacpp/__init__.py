"""llama.cpp's own API, as far as editors use it: ``/infill``."""
