"""Products with packed weights: the work of one thread, below `cpu.linear`, which divides it.

items   one work item: four panels of outputs, a block of rows, then bias, gate and residual
rows    rows of x prepared as the inner loops read them: normed, padded, widened or rounded to int8
tiles   inner loops in float32, by bfloat16 dots, and by AMX tiles
int8    inner loops in int8 (VNNI), and the rounding of x
code    the block of arguments of the inner loops, and LLVM code that they share
"""
