"""Operations on paged keys and values: each has a twin in torch (`reference`) and a compiled form (`cpu`).

`registry.ops` picks a backend. This package imports nothing else of Ramify.
"""
