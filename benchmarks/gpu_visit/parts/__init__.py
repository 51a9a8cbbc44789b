"""The parts of a visit: one module each, with ``run(figures: Figures) -> None``."""
